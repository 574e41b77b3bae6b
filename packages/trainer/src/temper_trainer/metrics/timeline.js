// Draws one step of the timeline: the servers' open requests, and a bar for each rollout.
(() => {
  const rows = JSON.parse(document.getElementById("timeline-data").textContent);
  const select = document.getElementById("timeline-step");
  const figure = document.getElementById("timeline-figure");
  const phases = ["waiting", "sampling", "environment", "scoring"];
  const width = 1060, left = 96, right = 12, serverHeight = 34, top = 26;
  const namespace = "http://www.w3.org/2000/svg";

  const add = (parent, name, attributes, text) => {
    const element = document.createElementNS(namespace, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  };
  const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
  const seconds = value => value >= 100 ? value.toFixed(0) : value >= 1 ? value.toFixed(2) : value.toFixed(3);

  // Seconds of each phase; where spans overlap, sampling counts, as in measure_phases.
  const measure = rollout => {
    const edges = rollout.spans.flatMap(([phase, begin, end]) => [[begin, 1, phase], [end, -1, phase]]);
    edges.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    const totals = { waiting: 0, sampling: 0, environment: 0, scoring: 0 };
    const open = { sampling: 0, environment: 0, scoring: 0 };
    let at = rollout.requested_s;
    for (const [edge, sign, phase] of [...edges, [rollout.scored_s, 0, "scoring"]]) {
      totals[Object.keys(open).find(each => open[each]) ?? "waiting"] += Math.max(0, edge - at);
      at = Math.max(at, edge);
      open[phase] += sign;
    }
    return totals;
  };

  const draw = row => {
    const rollouts = row.rollouts;
    const begin = Math.min(0, ...rollouts.map(each => each.requested_s));
    const end = Math.max(row.published_s, ...rollouts.map(each => each.scored_s));
    const scale = (width - left - right) / Math.max(end - begin, 1e-6);
    const x = at => left + (at - begin) * scale;
    const servers = [...new Set(rows.flatMap(each => Object.keys(each.servers)))].sort((a, b) => a - b);
    const barHeight = Math.max(4, Math.min(14, 560 / Math.max(rollouts.length, 1)));
    const serverTop = top + 4;
    const rolloutTop = serverTop + servers.length * (serverHeight + 6) + 6;
    const height = rolloutTop + rollouts.length * barHeight + 24;
    const svg = document.createElementNS(namespace, "svg");
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    figure.replaceChildren(svg);

    // Servers: all recorded steps that overlap this one, because a rollout may span several.
    servers.forEach((number, i) => {
      const base = serverTop + i * (serverHeight + 6) + serverHeight;
      const bins = rows.flatMap(each => {
        const server = each.servers[number];
        if (!server) return [];
        const shift = each.time_s - row.time_s;
        return server.open.map((open, bin) => [shift + server.begin_s + bin * server.bin_s, server.bin_s, open]);
      }).filter(([at, size]) => at + size > begin && at < end);
      const peak = Math.max(1, ...bins.map(([, , open]) => open));
      add(svg, "text", { x: 0, y: base - serverHeight / 2 + 4 }, `server ${number}`);
      add(svg, "line", { x1: left, x2: width - right, y1: base, y2: base, class: "axis" });
      for (const [at, size, open] of bins) {
        const from = Math.max(begin, at), to = Math.min(end, at + size);
        const high = open / peak * serverHeight;
        const bar = add(svg, "rect", { x: x(from), width: Math.max(0.3, (to - from) * scale), y: base - high, height: high, class: "server" });
        add(bar, "title", {}, `server ${number}: ${open.toFixed(1)} open requests; it decodes up to ${row.capacity} at a time`);
      }
      add(svg, "text", { x: left - 6, y: base - serverHeight + 9, class: "right" }, peak.toFixed(0));
    });

    rollouts.forEach((rollout, i) => {
      const y = rolloutTop + i * barHeight, size = Math.max(2, barHeight - 1.5);
      const group = add(svg, "g", {});
      const totals = measure(rollout);
      const name = `prompt ${rollout.group}, ${rollout.member < 0 ? "greedy rollout" : `rollout ${rollout.member}`}`;
      const reward = rollout.reward === null ? "failed" : `reward ${rollout.reward.toPrecision(3)}`;
      add(group, "title", {}, `${name}: ${count(rollout.turns, "turn")}, ${count(rollout.tokens, "token")}, ${reward}, `
        + `weights ${rollout.version} (staleness ${row.weight_version - rollout.version})\n`
        + phases.map(phase => `${phase} ${seconds(totals[phase])} s`).join(", "));
      const bar = (phase, from, to) => add(group, "rect", { x: x(from), width: Math.max(0.4, (to - from) * scale), y, height: size, class: phase });
      bar("waiting", rollout.requested_s, rollout.scored_s);
      // Sampling last, because it counts where spans overlap.
      for (const [phase, from, to] of rollout.spans.filter(each => each[0] !== "sampling")) bar(phase, from, to);
      for (const [phase, from, to] of rollout.spans.filter(each => each[0] === "sampling")) bar(phase, from, to);
      if (barHeight >= 10 || i % Math.ceil(12 / barHeight) === 0) {
        add(svg, "text", { x: 0, y: y + size / 2 + 3.5 }, `${rollout.group}.${rollout.member < 0 ? "greedy" : rollout.member}`);
      }
    });

    const mark = (at, text, anchor, labelTop) => {
      if (at < begin || at > end) return;
      add(svg, "line", { x1: x(at), x2: x(at), y1: top, y2: height - 20, class: "mark" });
      add(svg, "text", { x: x(at) + (anchor === "end" ? -3 : 3), y: labelTop, "text-anchor": anchor }, text);
    };
    mark(row.trained_s, "training", x(row.trained_s) > width * 0.8 ? "end" : "start", 22);
    // The weights of this and earlier steps, which open rollouts may have met.
    for (const each of rows) {
      const at = each.time_s - row.time_s + each.published_s;
      if (each.step < row.step) mark(at, `weights ${each.weight_version + 1}`, at > (begin + end) / 2 ? "end" : "start", 10);
    }
    // At most eight round intervals.
    const least = Math.max(end - begin, 1e-6) / 8, power = 10 ** Math.floor(Math.log10(least));
    const interval = power * [1, 2, 5, 10].find(each => each * power >= least);
    for (let i = Math.ceil(begin / interval); i * interval <= end; i++) {
      const anchor = x(i * interval) > width - 40 ? "end" : "middle";
      add(svg, "text", { x: x(i * interval), y: height - 4, "text-anchor": anchor }, `${Number((i * interval).toPrecision(6))} s`);
    }
    const shown = rollouts.length < row.num_rollouts ? `${rollouts.length} of ${row.num_rollouts} rollouts, evenly from the fastest to the slowest. ` : "";
    document.getElementById("timeline-note").textContent = shown
      + "Labels are prompt.rollout. Height of a server: open requests. Point at a bar for its numbers.";
  };

  for (const row of rows) select.add(new Option(`step ${row.step}`, row.step));
  select.selectedIndex = rows.length - 1;
  const show = () => draw(rows[select.selectedIndex]);
  select.addEventListener("change", show);
  show();
})();
