// Shows one rollout: each token colored by its log-prob or weight version, with its numbers.
(() => {
  const rows = JSON.parse(document.getElementById("rollout-data").textContent);
  const select = document.getElementById("rollout-choice");
  const color = document.getElementById("rollout-color");
  const view = document.getElementById("rollout-view");
  const detail = document.getElementById("rollout-detail");
  const number = value => value === null ? "not finite" : Number(value.toPrecision(4)).toString();

  const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
  const element = (name, className, text) => {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  // Newlines and spaces stay visible, and a newline breaks the line too.
  const visible = text => text === "" ? "\u00b7" : text.replaceAll("\n", "\u21b5\n").replaceAll("\t", "\u21e5");
  // From transparent at probability 1 to red at 0.
  const byLogprob = logprob => `rgb(220 60 40 / ${(0.75 * (1 - Math.exp(logprob))).toFixed(3)})`;
  const byVersion = (version, versions) => `hsl(${Math.round(200 + 300 * versions.indexOf(version) / Math.max(versions.length, 1)) % 360} 70% 55% / 0.35)`;

  const showSegment = (segment, versions) => {
    const block = element("div", `segment ${segment.role}`);
    const parts = [segment.role];
    if (segment.role === "completion") {
      const total = segment.logprobs.reduce((sum, each) => sum + each, 0);
      parts.push(count(segment.ids.length, "token"));
      if (segment.logprobs.length) parts.push(`mean log-prob ${number(total / segment.logprobs.length)}`);
      parts.push(`weights ${[...new Set(segment.versions)].join(", ")}`, `ended by ${segment.finish}`);
      if (segment.reward) parts.push(`reward ${number(segment.reward)}`);
    } else {
      parts.push(`${count(segment.ids.length, "token")}, not trained`);
    }
    block.append(element("div", "role", parts.join(" \u00b7 ")));
    const text = element("div", "tokens");
    segment.texts.forEach((each, i) => {
      const token = element("span", "token", visible(each));
      const facts = [`token ${i}`, JSON.stringify(each), `id ${segment.ids[i] ?? "hidden"}`];
      if (segment.logprobs?.[i] !== undefined) {
        const version = segment.versions[i] ?? segment.versions[0];
        facts.push(`log-prob ${number(segment.logprobs[i])}`, `probability ${number(Math.exp(segment.logprobs[i]))}`, `weights ${version}`);
        token.style.background = color.value === "version" ? byVersion(version, versions) : byLogprob(segment.logprobs[i]);
      }
      token.dataset.facts = facts.join(" \u00b7 ");
      text.append(token);
    });
    block.append(text);
    return block;
  };

  const show = () => {
    const row = rows[select.selectedIndex];
    const segments = row.histories.flat();
    const versions = [...new Set(segments.flatMap(each => each.versions ?? []))].sort((a, b) => a - b);
    view.replaceChildren();
    const facts = [`step ${row.step}`, `prompt ${row.prompt}`, `sample ${row.sample}`, `reward ${number(row.reward)}`];
    if (row.components.length) facts.push(`parts ${row.components.map(number).join(", ")}`);
    if (row.answer) facts.push(`answer ${row.answer}`);
    const shown = segments.reduce((sum, each) => sum + each.ids.length, 0);
    if (shown < row.num_tokens) facts.push(`${shown} of ${row.num_tokens} tokens`);
    view.append(element("p", "facts", facts.join(" \u00b7 ")));
    row.histories.forEach((history, i) => {
      if (row.histories.length > 1) view.append(element("p", "facts", i ? `history ${i + 1}` : "history of the last completion"));
      for (const segment of history) view.append(showSegment(segment, versions));
    });
    detail.textContent = "Point at a token for its id, log-prob and weight version.";
  };

  view.addEventListener("mouseover", event => {
    if (event.target.dataset.facts) detail.textContent = event.target.dataset.facts;
  });
  for (const row of rows) select.add(new Option(`step ${row.step}, prompt ${row.prompt}, sample ${row.sample}, reward ${number(row.reward)}`));
  select.addEventListener("change", show);
  color.addEventListener("change", show);
  show();
})();
