"""Signs that a model looks at images or listens: out of scope, and never accepted by mistake."""

import re

from temper_legacy_shim.configs.draft import Draft

_NAMES = re.compile(
    r"([-_./]|\b)(VL|Omni|o-2_6|MiniCPM-[Vo]|4\.1V|4\.5V|llava|internvl|pixtral|gemma-?3n|gemma-?4|paligemma|janus|smolvlm|ovis|idefics\d?|"
    r"phi-?3\.5-vision|multimodal|molmo\d?|ui-?tars|openvla|pi0\d?|kimi-vl|kimi-?k2\.5|glm-4v|deepseek-vl\d?|mllama|vision|audio|asr|tts|"
    r"r1v\d?|cosmos-reason\d?|aria|eagle-?2(\.5)?|blip-?\d?|instructblip|step-?3|points-reader|points-1\.5|mistral-small-3\.[12]|"
    r"ministral-3|mistral-medium-3|florence-?\d?|cogvlm\d?|fuyu|aya-vision)([-_./\d]|\b)"
    r"|-4\.\dV\b|\d+B?-?V\b|Llama-3\.2-(11|90)B|Qwen3\.5|Llama-4|gemma-?3-(4|12|27)b",
    re.IGNORECASE,
)
"""Of models of images, video and sound that are often trained; text models of the same families, such as gemma-3-1b, are not meant."""
_KEYS = ("data.image_key", "data.video_key", "data.audio_key")
_DATA = re.compile(
    r"geo3k|geometry3k|llava|vqa|deepeyes|mm-eureka|multimodal|screenspot|infigui|libero|coco|refcoco|mathvista", re.IGNORECASE
)


def find_images(draft: Draft) -> None:
    """Ask a person wherever the model, its data or its settings speak of images, video or sound."""
    model = draft.text("actor_rollout_ref.model.path") or draft.text("model.path") or draft.text("model.partial_pretrain")
    files = " ".join(text for key in ("data.train_files", "data.val_files", "data.path") if (text := draft.text(key)))
    signs = []
    if _NAMES.search(model):
        signs.append(f"the model is {model}")
    signs += [f"{key} is set" for key in _KEYS if draft.old.is_set(key) and draft.text(key)]
    if _DATA.search(files):
        signs.append(f"the data are {files[:80]}")
    if any("mm_preprocessor" in key or "limit_images" in key or "vision_tower" in key for key in draft.old.origin):
        signs.append("settings of images are set")
    if any(key.startswith("actor_rollout_ref.actor.") and key.endswith("freeze_vision_tower") for key in draft.old.origin):
        signs.append("a vision tower is frozen")
    if signs:
        draft.find(
            "person",
            "images",
            f"this looks like a model of images, video or sound ({'; '.join(dict.fromkeys(signs))}), which is out of scope here: "
            "no configuration is written. Where it is a text model after all, take those keys out, or give its path another name.",
        )
