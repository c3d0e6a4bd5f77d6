/** The served page: live text, and heads that can be switched off. `off` has for each run the heads by part. */
const off = page.runs.map(() => ({}));
let requests = 0;

function startLive() {
  const text = element("textarea", {value: page.text, rows: 2, ariaLabel: "Text"});
  const answer = element("input", {value: page.answer ?? "", placeholder: "its own answer", ariaLabel: "Answer"});
  const status = element("span", {className: "label", role: "status"});
  const form = element("form", {className: "live"}, text, ...(page.takesAnswer ? [answer] : []), element("button", {}, "Show"), status);
  let timer;
  form.oninput = () => {
    clearTimeout(timer);
    timer = setTimeout(refresh, 600);
  };
  form.onsubmit = (event) => {
    event.preventDefault();
    refresh();
  };
  document.querySelector("header").after(form);

  async function refresh() {
    clearTimeout(timer);
    const number = ++requests, body = JSON.stringify({text: text.value, answer: answer.value || null, off});
    status.textContent = "computing …";
    try {
      const response = await fetch("view", {method: "POST", headers: {"Content-Type": "application/json"}, body});
      const data = await response.json();
      if (number !== requests) return;
      status.textContent = response.ok ? "" : data.error;
      if (response.ok) await show(data);
    } catch {
      status.textContent = "The server does not answer.";
    }
  }

  function toggle(panel) {
    const part = panel.map.name.split(", ")[0], heads = off[panels.indexOf(panel)][part] ?? [];
    if (!panel.map.gated || panel.head < 0) return;
    off[panels.indexOf(panel)][part] = heads.includes(panel.head) ? heads.filter((head) => head !== panel.head) : [...heads, panel.head];
    refresh();
  }

  extensions.push((panel) => {
    const switchedOff = off[panels.indexOf(panel)] ?? {};
    const isOff = (map, head) => (switchedOff[map.name.split(", ")[0]] ?? []).includes(head);
    for (const {map, head, thumb} of panel.thumbs) thumb.classList.toggle("off", isOff(map, head));
    if (!panel.map.gated) return;
    const label = isOff(panel.map, panel.head) ? "switch head on (x)" : "switch head off (x)";
    panel.title.append(" ", element("button", {disabled: panel.head < 0, onclick: () => toggle(panel)}, label));
  });
  document.querySelector("#help dl").append(element("dt", {}, "x"), element("dd", {}, "switch the head off or on"));
  KEYS.x = () => panels.forEach(toggle);
}

/** The next tokens or the answer, beside those with all heads where some are off. */
function outcomeSection(outcome) {
  const section = element("section", {className: "counts"}, element("h3", {}, outcome.title));
  if (outcome.text !== undefined) {
    section.append(element("p", {className: "token"}, outcome.text));
    if (outcome.before !== null) section.append(element("p", {className: "note token"}, `with all heads: ${outcome.before}`));
    return section;
  }
  const list = element("ol", {className: "top"});
  for (const [token, probability, before] of outcome.tokens) {
    const bar = element("i");
    bar.style.width = `${Math.max(1, 100 * probability)}%`;
    const change = before === null ? "" : `, with all heads ${percent(before)}`;
    list.append(element("li", {}, element("span", {className: "token"}, visible(token)), bar, element("output", {}, percent(probability) + change)));
  }
  section.append(list);
  return section;
}
