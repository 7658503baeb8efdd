// Puts the page together: legend, plots with their tables, samples, tables.
const report = JSON.parse(document.getElementById("report").textContent);
const FULL = report.presses.indexOf("full");
const state = { setting: 0, off: new Set(), log: report.log };
const at = (id) => document.getElementById(id);
const named = (press) => make("th", { scope: "row" }, key(press), report.presses[press]);
const shows = (press) => press !== FULL && !state.off.has(press);
// The rows whose press is shown, its number in place of its name
const shownOf = (rows) => rows.map(([name, ...texts]) => [report.presses.indexOf(name), ...texts]).filter(([press]) => shows(press));
const browser = sampleBrowser(report, state);

// A plot in its frame, with a table of the same figures below it; returned is what draws it anew.
function figure({ section, title, task, kept, top, views, ...labels }) {
  const room = make("div");
  const about = make("small");
  const details = make("details", { ontoggle: () => fill() }, make("summary", {}, "As a table"));
  const host = make("figure", {}, make("figcaption", {}, title, about), room, details);
  const view = () => views[state.setting];
  const all = views.flatMap((one) => one?.points ?? []);
  const pick = task === undefined ? null : ({ press, ratio }) => browser.open(task, press, ratio);
  at(`${section}-plots`).append(host);

  function fill() {
    if (!details.open || !view()) return;
    const { columns, rows, note } = view().table;
    const ratioOf = (column) => report.ratios.find((ratio) => +ratio.toPrecision(6) === +column);
    const button = (press, ratio, text) => make("button", { type: "button", title: "Read these answers", onclick: () => pick({ press, ratio }) }, text);
    const cell = (press) => (text, i) => (pick && text !== "–" ? make("td", {}, button(press, ratioOf(columns[i + 1]), text)) : text);
    details.replaceChildren(details.firstChild, note ? make("p", { class: "small" }, note) : "",
      table(columns, shownOf(rows).map(([press, ...texts]) => [named(press), ...texts.map(cell(press))])));
  }

  return () => {
    host.hidden = !view();
    if (host.hidden) return;
    const { points, reference } = view();
    about.textContent = view().about;
    plot(room, { ...labels, reference, pick, points: points.filter(({ press }) => shows(press)), y: linear(top),
      x: !kept ? linear(Math.max(1.2, ...all.map(({ x }) => x))) : state.log ? logarithmic(report.smallest) : linear(1),
      summary: `${title}: ${labels.yLabel} against ${labels.xLabel}; the same figures are in the table below` });
    fill();
  };
}

const drawers = report.plots.map(figure);

function draw() {
  const shown = report.plots.filter(({ views }) => views[state.setting]);
  for (const id of ["average", "tasks", "cost"]) at(id).hidden = !shown.some(({ section }) => section === id);
  for (const drawer of drawers) drawer();
  // The last column of the relative averages: how far each press goes before it loses too much.
  const rows = report.plots[0].views[state.setting]?.table.rows ?? [];
  at("holds").replaceChildren(...shownOf(rows).map((row) => make("tr", {}, named(row[0]), make("td", {}, row.at(-1)))));
}

function legend() {
  const buttons = [...report.presses.keys()].filter((press) => press !== FULL).map((press) => make("button", {
    class: "press", type: "button", "data-press": press,
    onclick: () => { state.off.delete(press) || state.off.add(press); redraw(); },
    onpointerenter: () => highlight(shows(press) ? press : null), onpointerleave: () => highlight(null),
  }, key(press), report.presses[press]));
  const redraw = () => {
    for (const button of buttons) button.setAttribute("aria-pressed", shows(+button.dataset.press));
    draw();
  };
  const every = (name, off) => make("button", { class: "quiet", type: "button", onclick: () => { state.off = new Set(off); redraw(); } }, name);
  at("legend").append(...buttons, every("All", []), every("None", [...report.presses.keys()]));
  redraw();
}

function options() {
  if (report.settings.length > 1) {
    const select = make("select", { "aria-label": "Setting", onchange: () => { state.setting = +select.value; draw(); browser.changed(); } },
      report.settings.map((name, i) => make("option", { value: i }, name)));
    at("options").append(select);
  }
  const scale = make("button", { type: "button", onclick: () => { state.log = !state.log; show(); draw(); } });
  const show = () => {
    scale.setAttribute("aria-pressed", state.log);
    scale.textContent = state.log ? "Kept: logarithmic" : "Kept: linear";
  };
  show();
  at("options").append(scale);
}

function tables() {
  let section = "";
  for (const { section: name, title, note, columns, rows, labels } of report.tables) {
    if (name !== section && title) at("all-tables").append(make("h3", {}, name));
    section = name;
    const details = make("details", { ontoggle: () => {
      if (details.children.length === 1) details.append(note ? make("p", { class: "note" }, note) : "", table(columns, rows, labels));
    } }, make("summary", {}, title || name));
    at("all-tables").append(details);
  }
}

function theme() {
  const { style } = document.documentElement;
  const dark = () => (style.colorScheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const show = () => { at("theme").textContent = dark() ? "Light" : "Dark"; };
  at("theme").addEventListener("click", () => { style.colorScheme = dark() ? "light" : "dark"; show(); });
  show();
}

at("facts").append(...report.facts.flatMap((fact, i) => [i ? " · " : "", make("span", {}, fact)]));
at("average-note").textContent = report.tables.find(({ section }) => section.startsWith("Relative average"))?.note ?? "";
theme();
options();
legend();
tables();
let drawn = innerWidth;
addEventListener("resize", () => { if (innerWidth !== drawn) { drawn = innerWidth; draw(); } });
