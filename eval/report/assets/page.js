// Puts the page together: legend, plots with their tables, samples, tables.
const report = JSON.parse(document.getElementById("report").textContent);
const FULL = report.presses.indexOf("full");
const state = { setting: 0, off: new Set(), log: report.log };
const at = (id) => document.getElementById(id);
const fixed = (value, e) => (value === null ? "–" : value.toFixed(3) + (e === null ? "" : ` ± ${e.toFixed(3)}`));
const percent = (value) => `${+(100 * value).toFixed(1)} %`;
const browser = sampleBrowser(report, state);

const UNIT = linear(1, 0.2);
const kept = () => (state.log ? logarithmic(report.smallest) : UNIT);
const here = (rows) => rows.filter((row) => row.setting === state.setting);
const visible = () => report.presses.map((_, i) => i).filter((press) => press !== FULL && !state.off.has(press));

function seriesOf(rows, point) {
  return visible().map((press) => ({
    press,
    points: rows.filter((row) => row.press === press).map((row) => ({ ...point(row), row }))
      .filter(({ x, y }) => x !== null && y !== null).sort((a, b) => a.row.ratio - b.row.ratio),
  })).filter(({ points }) => points.length);
}

// Presses down, ratios across; the same figures as in the plot.
function valueTable(rows, cell, caption = "") {
  const ratios = report.ratios.filter((ratio) => rows.some((row) => row.ratio === ratio));
  const line = (press) => make("tr", {}, make("th", { scope: "row" }, key(press), report.presses[press]),
    ratios.map((ratio) => {
      const row = rows.find((one) => one.press === press && one.ratio === ratio);
      return make("td", {}, row ? cell(row) : "–");
    }));
  return make("div", { class: "scroll", tabindex: 0 }, make("table", {}, make("caption", {}, caption),
    make("thead", {}, make("tr", {}, make("th", { class: "text", scope: "col" }, "press"),
      ratios.map((ratio) => make("th", { scope: "col" }, `${ratio}`)))),
    make("tbody", {}, visible().filter((press) => rows.some((row) => row.press === press)).map(line))));
}

function figure(parent, title, draw, table, ...marks) {
  const details = make("details", {}, make("summary", {}, "As a table"));
  const host = make("figure", {}, make("figcaption", {}, title, ...marks), make("div", { class: "room" }), details);
  const fillTable = () => { if (details.open) details.replaceChildren(details.firstChild, table()); };
  details.addEventListener("toggle", fillTable);
  parent.append(host);
  return () => { draw(host); fillTable(); };
}

function taskFigure(task) {
  const rows = () => here(report.cells).filter((cell) => cell.task === task);
  const fullCell = () => rows().find((cell) => cell.press === FULL);
  const tell = ({ row }, press) => [`${report.presses[press]} at ${row.ratio}`, `score ${fixed(row.score, row.error)}, n ${row.n}`,
    `really kept ${percent(row.kept)}`,
    row.difference === null ? "" : `minus full ${fixed(row.difference, null)} [${row.interval.map((v) => v.toFixed(3)).join(", ")}]`];
  const open = (row) => browser.open(task, row.press, row.ratio);
  return figure(at("task-plots"), report.tasks[task], (host) => {
    host.hidden = !rows().length;
    if (host.hidden) return;
    const full = fullCell();
    host.querySelector("small").textContent = `${Math.max(...rows().map((cell) => cell.n))} contexts`;
    plot(host, {
      x: kept(), y: UNIT, xLabel: "kept fraction", yLabel: report.measures[task], tell, pick: ({ row }) => open(row),
      series: seriesOf(rows(), (row) => ({ x: row.kept, y: row.score, e: row.error })),
      reference: full && { y: full.score, e: full.error, label: `full cache ${full.score.toFixed(2)}` },
      summary: `${report.tasks[task]}: ${report.measures[task]} against kept fraction; the same figures are in the table below`,
    });
  }, () => valueTable(rows(), (row) => make("button", { type: "button", title: "Read these answers", onclick: () => open(row) },
    fixed(row.score, row.error)), fullCell() ? `Full cache: ${fixed(fullCell().score, fullCell().error)}` : ""), make("small"), report.imitations.includes(task) ? make("span", { class: "badge imitation" }, "imitation") : "");
}

function averageFigure() {
  const rows = () => here(report.averages);
  const tell = ({ row }, press) => [`${report.presses[press]} at ${row.ratio}`, `relative average ${fixed(row.relative, row.error)}`,
    `really kept ${percent(row.kept)}, ${row.tasks} of ${report.tasks.length} tasks`];
  return figure(at("average-plot"), "Share of the full cache's score", (host) => plot(host, {
    x: kept(), y: relativeScale(), xLabel: "kept fraction", yLabel: "relative average", tell,
    series: seriesOf(rows(), (row) => ({ x: row.kept, y: row.relative, e: row.error })),
    reference: { y: 1, label: "full cache" },
    summary: "Relative average over tasks against kept fraction; the same figures are in the table below",
  }), () => valueTable(rows(), (row) => fixed(row.relative, row.error)));
}

function relativeScale() {
  const largest = Math.max(1, ...report.averages.map((row) => row.relative + (row.error ?? 0)));
  return linear(Math.ceil(largest * 5 - 0.25) / 5, 0.2);
}

function costFigure(title, name) {
  const rows = () => here(report.averages).filter((row) => row[name] !== null);
  const tell = ({ row }, press) => [`${report.presses[press]} at ${row.ratio}`, `${row[name].toFixed(2)} x the full cache's`,
    `relative average ${fixed(row.relative, row.error)}`];
  return figure(at("cost-plots"), title, (host) => {
    host.hidden = !rows().length;
    if (host.hidden) return;
    plot(host, {
      x: upTo(Math.max(1.2, ...rows().map((row) => row[name]))), y: relativeScale(), xLabel: "x full cache", yLabel: "relative average",
      tell, series: seriesOf(rows(), (row) => ({ x: row[name], y: row.relative, e: row.error })),
      reference: { y: 1, x: 1, label: "full cache" },
      summary: `Relative average against ${title.toLowerCase()}; the same figures are in the table below`,
    });
  }, () => valueTable(rows(), (row) => `${row[name].toFixed(2)} x`));
}

// How far each press goes before it loses too much.
function holds() {
  const rows = visible().filter((press) => here(report.averages).some((row) => row.press === press))
    .map((press) => [press, report.holds[state.setting][press]]);
  at("holds").replaceChildren(make("div", { class: "panel" },
    make("h3", {}, `Holds ${percent(report.share)} of the full cache's score down to`),
    make("table", {}, make("tbody", {}, rows.map(([press, ratio]) => make("tr", {},
      make("th", { scope: "row" }, key(press), report.presses[press]),
      make("td", {}, ratio === null ? "–" : percent(ratio))))))));
}

const drawers = [averageFigure(), ...report.tasks.map((_, task) => taskFigure(task)),
  costFigure("Bytes of the cache", "memory"), costFigure("Prefill and compression", "compression"),
  costFigure("Time of an answer's token", "token")];

function draw() {
  for (const id of ["average", "cost"]) at(id).hidden = !here(report.averages).length;
  at("tasks").hidden = !here(report.cells).length;
  for (const drawer of drawers) drawer();
  holds();
}

function legend() {
  const buttons = report.presses.map((name, press) => press === FULL ? null : make("button", {
    class: "press", type: "button", "aria-pressed": `${!state.off.has(press)}`,
    onclick: () => { state.off.has(press) ? state.off.delete(press) : state.off.add(press); redraw(); },
    onpointerenter: () => highlight(state.off.has(press) ? null : press), onpointerleave: () => highlight(null),
  }, key(press), name));
  const redraw = () => {
    buttons.forEach((button, press) => button?.setAttribute("aria-pressed", `${!state.off.has(press)}`));
    draw();
  };
  const every = (off) => () => { state.off = new Set(off ? report.presses.keys() : []); redraw(); };
  at("legend").append(...buttons.filter(Boolean),
    make("button", { class: "quiet", type: "button", onclick: every(false) }, "All"),
    make("button", { class: "quiet", type: "button", onclick: every(true) }, "None"));
}

function options() {
  if (report.settings.length > 1) {
    const select = make("select", { "aria-label": "Setting", onchange: () => { state.setting = +select.value; draw(); browser.changed(); } },
      report.settings.map((name, i) => make("option", { value: i }, name)));
    at("options").append(select);
  }
  const scale = make("button", { type: "button", "aria-pressed": `${state.log}`, onclick: () => {
    state.log = !state.log;
    scale.setAttribute("aria-pressed", `${state.log}`);
    scale.textContent = state.log ? "Kept: logarithmic" : "Kept: linear";
    draw();
  } }, state.log ? "Kept: logarithmic" : "Kept: linear");
  at("options").append(scale);
}

function tables() {
  let section = "";
  for (const { section: name, title, note, columns, rows, labels } of report.tables) {
    if (name !== section && title) at("all-tables").append(make("h3", {}, name));
    section = name;
    const cell = (tag, extra) => (text, i) => make(tag, { class: i < labels && "text", ...extra }, text);
    const show = () => make("div", { class: "scroll", tabindex: 0 }, note ? make("p", { class: "note" }, note) : "", make("table", {},
      columns.some(Boolean) ? make("thead", {}, make("tr", {}, columns.map(cell("th", { scope: "col" })))) : "",
      make("tbody", {}, rows.map((row) => make("tr", {}, row.map(cell("td")))))));
    const details = make("details", { ontoggle: () => { if (details.children.length === 1) details.append(show()); } },
      make("summary", {}, title || name));
    at("all-tables").append(details);
  }
}

function theme() {
  const dark = () => (document.documentElement.style.colorScheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const show = () => { at("theme").textContent = dark() ? "Light" : "Dark"; };
  at("theme").addEventListener("click", () => { document.documentElement.style.colorScheme = dark() ? "light" : "dark"; show(); });
  show();
}

at("facts").append(...report.facts.flatMap((fact, i) => [i ? " · " : "", make("span", {}, fact)]));
at("average-note").textContent = report.tables.find(({ section }) => section.startsWith("Relative average"))?.note ?? "";
theme();
legend();
options();
draw();
tables();
let drawn = innerWidth;
addEventListener("resize", () => { if (innerWidth !== drawn) { drawn = innerWidth; draw(); } });
