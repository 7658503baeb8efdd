// The answers themselves: read when they are first needed, filtered as they are, drawn as they are opened.
const PAGE = 30;
const CHANGES = {
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

const look = (score) => (score === 1 ? "good" : score === 0 ? "bad" : "half");
const word = (score) => (score === 1 ? "right" : score === 0 ? "wrong" : `partly ${score.toFixed(2)}`);
const badge = (score, before = "") => make("span", { class: `badge ${look(score)}` }, before + word(score));
const entry = (term, text) => [make("dt", {}, term), make("dd", {}, text)];
const whole = (value) => (value === null ? "–" : value.toLocaleString("en"));
const mebibytes = (bytes) => (bytes === null ? "–" : (bytes / 2 ** 20).toFixed(1));

// The text with the reference answers in it marked.
function marked(text, answers) {
  const wanted = answers.filter((answer) => answer.length > 1).map((answer) => answer.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"));
  if (!wanted.length) return [text];
  return text.split(new RegExp(`(${wanted.join("|")})`, "iu")).map((part, i) => (i % 2 ? make("mark", {}, part) : part));
}

function sampleBrowser(report, state) {
  const filters = at("filters");
  let records = null;
  let found = [];

  // Each record with its context, and with the full cache's answers about it if it is of a press.
  function load() {
    const data = JSON.parse(at("records").textContent);
    const place = ({ setting, context }) => `${setting} ${context}`;
    const full = new Map(data.records.filter(({ press }) => press === FULL).map((record) => [place(record), record]));
    records = data.records;
    for (const record of records) record.full = (record.press !== FULL && full.get(place(record))) || null;
    for (const record of records) {
      record.context = data.contexts[record.context];
      record.answers = record.answers.map(([prediction, filtered, score]) => ({ prediction, filtered: filtered ?? prediction, score }));
    }
  }

  function refresh() {
    if (!records) load();
    const { task, press, ratio, outcome, change, text } = Object.fromEntries(new FormData(filters));
    const chosen = (filter, value) => filter === "" || +filter === value;
    const says = ({ context }, i, answer) => !text
      || [answer.prediction, context.questions[i].text, context.sample].join(" ").toLowerCase().includes(text.toLowerCase());
    const changed = ({ full }, i, answer) => change === "any" || (full && CHANGES[change](answer, full.answers[i]));
    found = records
      .filter((record) => record.setting === state.setting && chosen(task, record.context.task) && chosen(press, record.press) && chosen(ratio, record.ratio))
      .flatMap((record) => record.answers.map((answer, i) => ({ record, i, answer })))
      .filter(({ record, i, answer }) => OUTCOMES[outcome](answer.score) && changed(record, i, answer) && says(record, i, answer));
    at("cards").replaceChildren();
    at("count").textContent = `${whole(found.length)} ${found.length === 1 ? "answer" : "answers"}`;
    more();
  }

  function more() {
    const shown = at("cards").children.length;
    at("cards").append(...found.slice(shown, shown + PAGE).map(card));
    at("more").hidden = shown + PAGE >= found.length;
  }

  const titleOf = ({ press, ratio }) => report.presses[press] + (press === FULL ? "" : ` at ${ratio}`);

  function card({ record, i }) {
    const { context, full, answers } = record;
    const node = make("details", { class: "card", ontoggle: () => { if (node.open && node.children.length === 1) node.append(body(node, record, i)); } },
      make("summary", {}, key(record.press), make("b", {}, titleOf(record)), badge(answers[i].score),
        full && badge(full.answers[i].score, "full: "),
        make("span", {}, `${report.tasks[context.task]} · ${context.sample}`),
        make("span", { class: "asked" }, context.questions[i].text)));
    return node;
  }

  function body(node, record, i) {
    const { context, full } = record;
    const { text, answer_prefix: prefix, metric, ...question } = context.questions[i];
    const answers = question.answers.map(String);
    return make("div", {},
      make("dl", {}, entry("Question", text), prefix && entry("Answer begins", prefix),
        entry("Reference", answers.join("\n") || "none given"), entry("Metric", metric),
        entry("Kept", `${(100 * record.kept).toFixed(1)} % of the pairs (${whole(record.kept_pairs)} of ${whole(record.total_pairs)})`),
        entry("Cache", `${mebibytes(record.cache_bytes)} MiB; full ${mebibytes(record.full_bytes)} MiB`),
        entry("Seconds", Object.entries(record.seconds).map(([part, s]) => `${part} ${s === null ? "–" : s.toFixed(2)}`).join(", "))),
      make("div", { class: "pair" }, answered(record, i, answers), full && answered(full, i, answers)),
      make("p", { class: "small" }, `Context, ${whole(context.tokens)} tokens, its beginning and end:`),
      make("pre", { class: "context" }, marked(context.excerpt, answers)),
      make("details", {}, make("summary", {}, "This question under every press and kept fraction"), everywhere(node, record, i)));
  }

  function answered(record, i, references) {
    const { prediction, filtered, score } = record.answers[i];
    return make("div", { class: `answer ${colour(record.press)}` },
      make("h3", {}, key(record.press), titleOf(record), badge(score)),
      make("span", { class: "small" }, "Raw answer"),
      make("pre", {}, prediction === "" ? "(empty)" : marked(prediction, references)),
      filtered !== prediction && [make("span", { class: "small" }, "What the metric saw"), make("pre", {}, filtered || "(empty)")]);
  }

  // The scores of this question; each leads to its answer in the place of this card.
  function everywhere(node, record, i) {
    const others = records.filter(({ context, setting }) => context === record.context && setting === record.setting);
    const ratios = [...new Set(others.map(({ ratio }) => ratio))].sort((a, b) => a - b);
    const turn = (other) => {
      const next = card({ record: other, i });
      next.open = true;
      node.replaceWith(next);
      next.firstChild.focus();
    };
    const cell = (other) => {
      const { score } = other.answers[i];
      return make("td", { class: look(score), "aria-current": other === record && "true" }, make("button",
        { type: "button", title: `${word(score)}: read this answer`, onclick: () => turn(other) }, `${+score.toFixed(2)}`));
    };
    return table(["press", ...ratios], [...new Set(others.map(({ press }) => press))].map((press) => [named(press),
      ...ratios.map((ratio) => others.find((other) => other.press === press && other.ratio === ratio)).map((other) => (other ? cell(other) : ""))]));
  }

  const choice = (name, label, options) => make("label", {}, label, make("select", { id: `filter-${name}`, name },
    options.map(([value, text]) => make("option", { value }, text))));
  const numbered = (names) => [["", "all"], ...names.map((name, i) => [i, name])];
  const same = (names) => names.map((name) => [name, name]);
  filters.append(
    choice("task", "Task", numbered(report.tasks)), choice("press", "Press", numbered(report.presses)),
    choice("ratio", "Ratio", [["", "all"], ...same(report.ratios)]),
    choice("outcome", "Answer is", same(Object.keys(OUTCOMES))), choice("change", "Against the full cache", same(Object.keys(CHANGES))),
    make("label", {}, "Contains", make("input", { id: "filter-text", name: "text", type: "search", placeholder: "question, answer, sample" })));
  let waiting = 0;
  filters.addEventListener("input", ({ target }) => {
    clearTimeout(waiting);
    if (target.matches("select")) refresh();
    else waiting = setTimeout(refresh, 150);
  });
  filters.addEventListener("submit", (event) => event.preventDefault());
  at("more").addEventListener("click", more);
  new IntersectionObserver((entries, observer) => {
    if (entries.some((seen) => seen.isIntersecting)) { observer.disconnect(); if (!records) refresh(); }
  }, { rootMargin: "400px" }).observe(at("samples"));

  return {
    changed: () => { if (records) refresh(); },
    open(task, press, ratio) {
      filters.reset();
      Object.entries({ task, press, ratio }).forEach(([name, value]) => { filters.elements[name].value = value; });
      refresh();
      at("samples").scrollIntoView();
      at("filter-task").focus({ preventScroll: true });
    },
  };
}
