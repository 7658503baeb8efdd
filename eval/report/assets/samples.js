// The answers themselves: read when they are first needed, filtered as they are, drawn as they are opened.
const PAGE = 30;
const BETTER = {
  "any": () => true,
  "worse": (answer, full) => answer.score < full.score,
  "better": (answer, full) => answer.score > full.score,
  "same score": (answer, full) => answer.score === full.score,
  "another text": (answer, full) => answer.prediction !== full.prediction,
  "the same text": (answer, full) => answer.prediction === full.prediction,
};
const OUTCOMES = {
  "any": () => true,
  "right (1)": (score) => score === 1,
  "partly right": (score) => score > 0 && score < 1,
  "wrong (0)": (score) => score === 0,
};

function sampleBrowser(report, state) {
  const by = (id) => document.getElementById(id);
  const filters = { task: "", press: "", ratio: "", outcome: "any", change: "any", text: "" };
  let data = null;
  let found = [];
  let shown = 0;

  function load() {
    if (data) return data;
    data = JSON.parse(by("records").textContent);
    const full = report.presses.indexOf("full");
    data.full = new Map(data.records.filter((r) => r.press === full).map((r) => [`${r.setting} ${r.context}`, r]));
    for (const record of data.records) {
      record.answers = record.answers.map(([prediction, filtered, score]) =>
        ({ prediction, filtered: filtered ?? prediction, score }));
    }
    return data;
  }

  const fullOf = (record) => data.full.get(`${record.setting} ${record.context}`);

  function matching() {
    const { contexts, records } = load();
    const [task, press, ratio] = [filters.task, filters.press, filters.ratio].map((text) => (text === "" ? null : +text));
    const [rightly, changed, words] = [OUTCOMES[filters.outcome], BETTER[filters.change], filters.text.toLowerCase()];
    const items = [];
    for (const record of records) {
      const context = contexts[record.context];
      if (record.setting !== state.setting || (task !== null && context.task !== task)) continue;
      if ((press !== null && record.press !== press) || (ratio !== null && record.ratio !== ratio)) continue;
      const full = fullOf(record);
      record.answers.forEach((answer, i) => {
        if (!rightly(answer.score)) return;
        if (filters.change !== "any" && !(full && full !== record && changed(answer, full.answers[i]))) return;
        if (words && ![answer.prediction, context.questions[i].text, context.sample].join(" ").toLowerCase().includes(words)) return;
        items.push({ record, context, i, full });
      });
    }
    return items;
  }

  function refresh() {
    found = matching();
    shown = 0;
    by("cards").replaceChildren();
    by("count").textContent = `${found.length.toLocaleString("en")} ${found.length === 1 ? "answer" : "answers"}`;
    more();
  }

  function more() {
    by("cards").append(...found.slice(shown, shown + PAGE).map(card));
    shown = Math.min(shown + PAGE, found.length);
    by("more").hidden = shown === found.length;
  }

  const look = (score) => (score === 1 ? "good" : score === 0 ? "bad" : "half");
  const word = (score) => (score === 1 ? "right" : score === 0 ? "wrong" : `partly ${score.toFixed(2)}`);
  const badge = (score, before = "") => make("span", { class: `badge ${look(score)}` }, before + word(score));

  const named = (record) => report.presses[record.press] + (record === fullOf(record) ? "" : ` at ${record.ratio}`);

  function card({ record, context, i, full }) {
    const node = make("details", { class: "card" },
      make("summary", {}, key(record.press), make("b", {}, named(record)), badge(record.answers[i].score),
        full && full !== record ? badge(full.answers[i].score, "full: ") : null,
        make("span", {}, `${report.tasks[context.task]} · ${context.sample}`),
        make("span", { class: "asked" }, context.questions[i].text)));
    node.addEventListener("toggle", () => {
      if (node.open && node.children.length === 1) node.append(body(node, record, context, i, full));
    });
    return node;
  }

  // Another press or ratio in the place of this card.
  function turn(node, record, context, i) {
    const other = card({ record, context, i, full: fullOf(record) });
    other.open = true;
    node.replaceWith(other);
    other.firstChild.focus();
  }

  function body(node, record, context, i, full) {
    const question = context.questions[i];
    const answers = question.answers.length ? question.answers.join("\n") : "none given";
    return make("div", {},
      make("dl", {}, entry("Question", question.text), question.prefix ? entry("Answer begins", question.prefix) : null,
        entry("Reference", answers), entry("Metric", question.metric),
        entry("Kept", `${(100 * record.kept).toFixed(1)} % of the pairs (${count(record.kept_pairs)} of ${count(record.total_pairs)})`),
        entry("Cache", `${mebibytes(record.cache_bytes)} MiB; full ${mebibytes(record.full_bytes)} MiB`),
        entry("Seconds", Object.entries(record.seconds).map(([part, s]) => `${part} ${s === null ? "–" : s.toFixed(2)}`).join(", "))),
      make("div", { class: "pair" }, answered(record, question, i), full && full !== record ? answered(full, question, i) : null),
      make("p", { class: "small" }, `Context, ${count(context.tokens)} tokens, its beginning and end:`),
      make("pre", { class: "context" }, marked(context.excerpt, question.answers)),
      everywhere(node, record, context, i));
  }

  function answered(record, question, i) {
    const { prediction, filtered, score } = record.answers[i];
    return make("div", { class: `answer ${colour(record.press)}` },
      make("h3", {}, key(record.press), named(record), badge(score)),
      make("span", { class: "small" }, "Raw answer"),
      make("pre", {}, prediction === "" ? "(empty)" : marked(prediction, question.answers)),
      filtered === prediction ? null : [make("span", { class: "small" }, "What the metric saw"), make("pre", {}, filtered || "(empty)")]);
  }

  // The scores of this question under every press and ratio.
  function everywhere(node, record, context, i) {
    const others = data.records.filter((r) => r.context === record.context && r.setting === record.setting);
    const ratios = [...new Set(others.map((r) => r.ratio))].sort((a, b) => a - b);
    const rows = [...new Set(others.map((r) => r.press))].map((press) => make("tr", {},
      make("th", { scope: "row" }, key(press), report.presses[press]),
      ratios.map((ratio) => {
        const other = others.find((r) => r.press === press && r.ratio === ratio);
        if (!other) return make("td");
        const { score } = other.answers[i];
        return make("td", { class: look(score), "aria-current": other === record && "true" }, make("button", { type: "button",
          title: `${word(score)}: read this answer`, onclick: () => turn(node, other, context, i) }, `${+score.toFixed(2)}`));
      })));
    return make("details", {}, make("summary", {}, "This question under every press and kept fraction"),
      make("div", { class: "scroll", tabindex: 0 }, make("table", {},
        make("thead", {}, make("tr", {}, make("th", { scope: "col", class: "text" }, "press"),
          ratios.map((ratio) => make("th", { scope: "col" }, `${ratio}`)))),
        make("tbody", {}, rows))));
  }

  function choice(name, label, options) {
    const select = make("select", { id: `filter-${name}`, onchange: () => { filters[name] = select.value; refresh(); } },
      options.map(([value, text]) => make("option", { value }, text)));
    return make("label", {}, label, select);
  }

  const numbered = (names) => [["", "all"], ...names.map((name, i) => [`${i}`, name])];
  const same = (names) => Object.keys(names).map((name) => [name, name]);
  let waiting = 0;
  const search = make("input", { id: "filter-text", type: "search", placeholder: "question, answer, sample",
    oninput: () => { clearTimeout(waiting); waiting = setTimeout(() => { filters.text = search.value; refresh(); }, 150); } });
  by("filters").append(
    choice("task", "Task", numbered(report.tasks)), choice("press", "Press", numbered(report.presses)),
    choice("ratio", "Ratio", [["", "all"], ...report.ratios.map((ratio) => [`${ratio}`, `${ratio}`])]),
    choice("outcome", "Answer is", same(OUTCOMES)), choice("change", "Against the full cache", same(BETTER)),
    make("label", {}, "Contains", search));
  by("filters").addEventListener("submit", (event) => event.preventDefault());
  by("more").addEventListener("click", more);
  new IntersectionObserver((entries, observer) => {
    if (entries.some((seen) => seen.isIntersecting)) { observer.disconnect(); if (!data) refresh(); }
  }, { rootMargin: "400px" }).observe(by("samples"));

  return {
    changed: () => { if (data) refresh(); },
    open(task, press, ratio) {
      Object.assign(filters, { task: `${task}`, press: `${press}`, ratio: `${ratio}`, outcome: "any", change: "any", text: "" });
      for (const name of Object.keys(filters)) by(`filter-${name}`).value = filters[name];
      refresh();
      by("samples").scrollIntoView();
      by("filter-task").focus({ preventScroll: true });
    },
  };
}

const entry = (term, text) => [make("dt", {}, term), make("dd", {}, text)];
const count = (value) => (value === null ? "–" : value.toLocaleString("en"));
const mebibytes = (bytes) => (bytes === null ? "–" : (bytes / 2 ** 20).toFixed(1));

// The text with the reference answers in it marked.
function marked(text, answers) {
  const lower = text.toLowerCase();
  const parts = [];
  let start = 0;
  const next = () => answers.filter((answer) => answer.length > 1)
    .map((answer) => ({ at: lower.indexOf(answer.toLowerCase(), start), length: answer.length }))
    .filter(({ at }) => at >= 0).sort((a, b) => a.at - b.at)[0];
  for (let hit = next(); hit; hit = next()) {
    parts.push(text.slice(start, hit.at), make("mark", {}, text.slice(hit.at, hit.at + hit.length)));
    start = hit.at + hit.length;
  }
  return [...parts, text.slice(start)];
}
