"""Faulty engines with wrong adapters. Each has one bug."""

from dataclasses import replace

from data_parallel_oracle import DataParallelOracle

from temper_engine_api.weights import NamedWeight


class _ChangedLora(DataParallelOracle):
    """Builds another adapter than the configuration asks for."""

    def _build(self):
        lora = self.config.lora
        if lora.is_enabled:
            self.config = replace(self.config, lora=self._change(lora))
        return super()._build()


class IgnoresAlphaOfNewAdapter(_ChangedLora):
    """Scales a new adapter by 1."""

    def _change(self, lora):
        return lora if lora.path else replace(lora, alpha=float(lora.rank))


class AdaptsAttentionOnly(_ChangedLora):
    """Takes ``all-linear`` of a new adapter for the layers of attention."""

    def _change(self, lora):
        if lora.path or lora.target_modules != "all-linear":
            return lora
        return replace(lora, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))


class IgnoresRsloraOfNewAdapter(_ChangedLora):
    """Scales a new adapter by alpha / rank although ``rslora`` is set, and exports it as rsLoRA."""

    def _change(self, lora):
        return lora if lora.path else replace(lora, rslora=False)

    def _export_adapter(self):
        config, tensors = super()._export_adapter()
        return {**config, "use_rslora": True}, tensors


class IgnoresDoraOfNewAdapter(_ChangedLora):
    """Builds a new adapter without the magnitudes that ``dora`` asks for."""

    def _change(self, lora):
        return lora if lora.path else replace(lora, dora=False)


class IgnoresTargetModules(_ChangedLora):
    """Adapts all linear layers although ``target_modules`` of a new adapter names some of them."""

    def _change(self, lora):
        return lora if lora.path else replace(lora, target_modules="all-linear")


class AdaptsExcludedModules(_ChangedLora):
    """Also adapts the modules that ``exclude_modules`` of a new adapter names."""

    def _change(self, lora):
        return lora if lora.path else replace(lora, exclude_modules=())


class IgnoresAdapterDropout(_ChangedLora):
    """Never applies the adapter's dropout."""

    def _change(self, lora):
        return replace(lora, dropout=0.0)


class AdaptsNoSharedExperts(_ChangedLora):
    """Takes ``all-linear`` of a new adapter in a mixture for attention and dense layers."""

    def _change(self, lora):
        if lora.path or lora.target_modules != "all-linear":
            return lora
        return replace(lora, exclude_modules=r".*\.shared_experts?\..*")


class DecaysNoAdapter(DataParallelOracle):
    """Applies no weight decay to an adapter."""

    def _adamw(self, name, parameter, gradient, *, lr, spec):
        if self.adapter is not None:
            spec = replace(spec, weight_decay=0.0)
        super()._adamw(name, parameter, gradient, lr=lr, spec=spec)


class TrainsOnlyB(DataParallelOracle):
    """Updates the second factor of an adapter only, which is 0 at the start."""

    def _adamw(self, name, parameter, gradient, *, lr, spec):
        super()._adamw(name, parameter, gradient, lr=0.0 if "lora_A" in name else lr, spec=spec)


class MergesExpertsTransposed(DataParallelOracle):
    """Merges the adapter of experts transposed where their matrices are square."""

    def _iterate_weights(self):
        base = {} if self.adapter is None else self.adapter.base_parameters()
        for name, merged in super()._iterate_weights():
            is_square = ".experts." in name and merged.shape[-2] == merged.shape[-1]
            yield NamedWeight(
                name=name,
                tensor=base[name] + (merged - base[name]).mT
                if is_square and name in base
                else merged,
            )


class ExportsAdapterBeforeLoad(DataParallelOracle):
    """Exports the adapter that ``load_adapter`` replaced until the next update."""

    _replaced = None

    def _load_adapter(self, config, tensors):
        replaced = super()._export_adapter()
        super()._load_adapter(config, tensors)
        self._replaced = replaced

    def _export_adapter(self):
        return self._replaced or super()._export_adapter()

    def _apply_gradients(self, *, lr):
        self._replaced = None
        return super()._apply_gradients(lr=lr)
