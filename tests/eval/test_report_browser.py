"""The page in a real browser: what is drawn, what the controls do, that nothing is asked of a network."""

import os
import re
import shutil

import pytest
from report_records import HALF, HOSTILE, RATIOS, TASKS, made_page, realistic, record

from kvzip_press.eval.report.summary import summarise

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright, which drives a browser, is not installed")

PRESSES = [press for press in HALF if press != "full"]
OPTIONS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
INSIDE = re.compile(r"data:|.*/report\.html$")
PLOTS = 1 + len(TASKS) + 3


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    with sync_api.sync_playwright() as playwright:
        if found is None and not os.path.exists(playwright.chromium.executable_path):
            pytest.skip("no Chromium is installed")
        started = playwright.chromium.launch(executable_path=found, args=OPTIONS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def records():
    return realistic()


def write_page(folder, records):
    path = folder / "report.html"
    path.write_text(made_page(records, "Model <b>"), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def file(records, tmp_path_factory):
    return write_page(tmp_path_factory.mktemp("page"), records)


@pytest.fixture
def open_page(browser, file):
    """Open the page; afterwards, fail if anything went wrong in it or was asked of anything but the file."""
    contexts, troubles = [], []

    def open_one(file=file, **options):
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: troubles.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda request: INSIDE.match(request.url) or troubles.append(request.url))
        page.goto(file.as_uri())
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert troubles == []


def samples_of(page):
    """Scroll to the samples, which are drawn when they are first seen."""
    page.locator("#samples").scroll_into_view_if_needed()
    page.wait_for_selector(".card")


def count(page):
    return int(re.match(r"[\d,]+", page.inner_text("#count")).group().replace(",", ""))


def test_every_plot_is_drawn_with_one_colour_and_marker_for_a_press(open_page):
    page = open_page()
    assert page.title() == "Model <b>"
    assert page.locator("svg.plot").count() == PLOTS
    assert page.locator("svg.plot .series").count() == PLOTS * len(PRESSES)
    assert page.locator("svg.plot path.dot").count() == PLOTS * len(PRESSES) * len(RATIOS)
    assert page.locator("#tasks-plots .reference").count() == len(TASKS)
    looks = page.eval_on_selector_all(
        ".series path.dot, #legend path.dot, #holds path.dot",
        "dots => dots.map(dot => [dot.closest('.p0,.p1,.p2,.p3,.p4').classList.value.match(/p\\d/)[0],"
        " getComputedStyle(dot).fill, dot.getAttribute('d')].join(' '))",
    )
    assert len(set(looks)) == len(PRESSES)
    assert len({look.split(" ", 1)[1] for look in looks}) == len(PRESSES)


def test_points_lie_where_their_figures_say(open_page, records):
    page = open_page()
    figure = page.locator("#tasks-plots figure").first
    texts = {tick.text_content(): tick for tick in figure.locator("text[text-anchor=end]").all()}
    ticks = {float(t): float(tick.get_attribute("y")) - 4 for t, tick in texts.items() if re.fullmatch(r"[\d.]+", t)}
    assert set(ticks) == {0, 0.2, 0.4, 0.6, 0.8, 1}
    cells = [cell for cell in summarise(records).cells if (cell.task, cell.press) == ("niah_multikey_1", "kvzip")]
    dots = figure.locator(f'.series[data-press="{1 + PRESSES.index("kvzip")}"] path.dot').all()
    for dot, cell in zip(dots, sorted(cells, key=lambda cell: cell.ratio), strict=True):
        height = float(re.search(r" ([\d.]+)\)", dot.get_attribute("transform")).group(1))
        assert (ticks[0] - height) / (ticks[0] - ticks[1]) == pytest.approx(cell.score, abs=0.005)


def test_a_press_can_be_switched_off_and_on(open_page):
    page = open_page()
    button = page.get_by_role("button", name="snapkv", exact=True)
    of_snapkv = page.locator(f'svg.plot .series[data-press="{1 + PRESSES.index("snapkv")}"]')
    page.locator("#tasks-plots figure summary").first.click()
    table = page.locator("#tasks-plots figure table").first
    assert of_snapkv.count() == PLOTS and table.get_by_text("snapkv").count() == 1
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert of_snapkv.count() == 0 and table.get_by_text("snapkv").count() == 0
    assert page.locator("svg.plot .series").count() == PLOTS * (len(PRESSES) - 1)
    page.get_by_role("button", name="None", exact=True).click()
    assert page.locator("svg.plot .series").count() == 0
    button.press("Enter")
    assert of_snapkv.count() == PLOTS == page.locator("svg.plot .series").count()
    page.get_by_role("button", name="All", exact=True).click()
    assert page.locator("svg.plot .series").count() == PLOTS * len(PRESSES)


def test_the_answers_can_be_filtered(open_page, records):
    page = open_page()
    samples_of(page)
    questions = sum(len(made["questions"]) for made in records)
    assert count(page) == questions
    assert page.locator(".card").count() == 30
    page.click("#more")
    assert page.locator(".card").count() == 60

    full = {(made["task"], made["sample"]): made for made in records if made["press"] == "full"}
    chosen = [made for made in records if (made["task"], made["press"], made["ratio"]) == ("squad", "knorm", 0.5)]
    pairs = [
        (answer["score"], base["score"])
        for made in chosen
        for answer, base in zip(made["questions"], full["squad", made["sample"]]["questions"], strict=True)
    ]
    page.select_option("#filter-task", label="squad")
    page.select_option("#filter-press", label="knorm")
    page.select_option("#filter-ratio", "0.5")
    assert count(page) == len(pairs) == 36
    page.select_option("#filter-outcome", "wrong (0)")
    assert count(page) == sum(ours == 0 for ours, _ in pairs) > 0
    page.select_option("#filter-change", "worse")
    worse = sum(ours < theirs for ours, theirs in pairs)
    assert count(page) == page.locator(".card").count() == worse > 0
    page.fill("#filter-text", "no such words")
    sync_api.expect(page.locator("#count")).to_have_text("0 answers")


def test_a_card_shows_both_answers_and_leads_to_others(open_page, records):
    page = open_page()
    page.locator("#tasks-plots figure summary").nth(1).click()
    row = page.locator("#tasks-plots figure").nth(1).get_by_role("row", name="kvzip").first
    row.get_by_role("button").nth(2).press("Enter")
    assert page.input_value("#filter-task") == "1" and page.input_value("#filter-ratio") == "0.2"
    made = next(m for m in records if (m["task"], m["press"], m["ratio"]) == ("scbench_kv", "kvzip", 0.2))
    base = next(m for m in records if (m["task"], m["press"]) == ("scbench_kv", "full"))
    card = page.locator(".card").first
    card.locator("> summary").click()
    texts = card.locator(".answer pre").all_text_contents()
    assert texts == [m["questions"][0][name] for m in (made, base) for name in ("prediction", "filtered")]
    assert HOSTILE in texts[0] and page.locator("main img").count() == 0 and page.title() == "Model <b>"
    content = card.inner_text()
    assert made["questions"][0]["text"] in content and made["context_excerpt"] in content
    assert f"{made['kept_pairs']:,} of {made['total_pairs']:,}" in content
    assert f"{made['cache_bytes'] / 2**20:.1f} MiB; full {made['full_bytes'] / 2**20:.1f} MiB" in content

    card.locator("details summary").click()
    cells = card.locator("td button")
    assert cells.count() == 1 + len(PRESSES) * len(RATIOS)
    cells.nth(0).click()
    sync_api.expect(page.locator(".card").first.locator(".answer pre")).to_have_text(texts[2:])


@pytest.mark.parametrize("width", [1280, 390])
def test_a_point_leads_to_its_answers(open_page, width):
    """The plot fills its frame: were it scaled, points near the right edge would tell of their neighbours."""
    page = open_page(viewport={"width": width, "height": 900})
    knorm = 1 + PRESSES.index("knorm")
    dots = page.locator(f'#tasks-plots figure >> nth=2 >> .series[data-press="{knorm}"] path.dot')
    for dot, ratio in zip(dots.all()[3:], RATIOS[3:], strict=True):
        dot.hover(force=True)
        assert page.locator("#tip").inner_text().startswith(f"knorm at {ratio}\nscore ")
    dots.last.click(force=True)
    values = [page.input_value(f"#filter-{name}") for name in ("task", "press", "ratio")]
    assert values == ["2", f"{knorm}", "0.9"]
    assert count(page) == 36 and page.locator("#tip").is_hidden()


def test_the_kept_fraction_can_be_logarithmic(open_page):
    page = open_page()
    ticks = page.locator("#average-plots text[text-anchor=middle]")
    assert ticks.all_text_contents() == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    page.get_by_role("button", name="Kept: linear").click()
    assert ticks.all_text_contents() == ["0.05", "0.1", "0.2", "0.5", "1"]
    places = [float(tick.get_attribute("x")) for tick in ticks.all()]
    assert places[1] - places[0] == pytest.approx(places[4] - places[3])


def test_dark_and_light(open_page):
    def luminance(page):
        return sum(map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))))

    light, dark = open_page(color_scheme="light"), open_page(color_scheme="dark")
    assert luminance(light) > 650 and luminance(dark) < 120
    dark.get_by_role("button", name="Light").click()
    assert luminance(dark) > 650


def test_a_phone_does_not_scroll_sideways(open_page):
    page = open_page(viewport={"width": 360, "height": 780}, is_mobile=True, has_touch=True)
    for summary in page.locator("#main figure summary, #all-tables summary").all():
        summary.click()
    samples_of(page)
    page.locator(".card > summary").first.click()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.locator("svg.plot").count() == PLOTS
    # The first tap tells, the second leads to the answers.
    dot = page.locator('#tasks-plots .series[data-press="1"] path.dot').nth(3)
    dot.tap(force=True)
    assert page.locator("#tip").is_visible() and page.input_value("#filter-ratio") == ""
    dot.tap(force=True)
    assert page.input_value("#filter-ratio") == "0.3"


def test_everything_has_a_name(open_page):
    page = open_page()
    samples_of(page)
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, select, input, svg.plot')].filter(node =>"
        " !(node.labels?.length || node.getAttribute('aria-label') || node.matches('button') && node.innerText.trim()))"
        ".map(node => node.outerHTML)"
    )
    assert unnamed == []
    assert page.locator("svg.plot").count() == page.locator("figure details").count()


def test_little_can_be_shown_too(open_page, tmp_path):
    """One context without a full cache: nothing to compare, no error to draw."""
    page = open_page(write_page(tmp_path, [record("one", "0", "kvzip", 0.3, [1.0, 0.5])]))
    assert page.locator("svg.plot:visible").count() == page.locator("svg.plot:visible path.dot").count() == 1
    assert page.locator("#average").is_hidden() and page.locator("#cost").is_hidden()
    samples_of(page)
    page.locator(".card > summary").nth(1).click()
    sync_api.expect(page.locator(".card").nth(1).locator(".answer")).to_contain_text("partly 0.50")


def test_nothing_but_skipped_contexts(open_page, tmp_path):
    page = open_page(write_page(tmp_path, [record("one", "0", "full", 1.0, [], skipped="too long", questions=[])]))
    assert page.locator("figure:visible").count() == 0
    page.get_by_text("Skipped", exact=True).click()
    sync_api.expect(page.get_by_role("cell", name="too long")).to_be_visible()


def test_settings_are_shown_one_at_a_time(open_page, tmp_path):
    made = [
        record(task, "0", press, ratio, [score], protocol=protocol)
        for protocol, task, score in (("agnostic", "one", 1.0), ("aware", "one", 0.5), ("aware", "two", 0.25))
        for press, ratio in (("full", 1.0), ("kvzip", 0.3))
    ]
    page = open_page(write_page(tmp_path, made))
    assert page.locator("#tasks-plots figure:visible").count() == 1
    assert page.locator("#tasks-plots .reference-label").all_text_contents() == ["full cache 1.00"]
    page.get_by_label("Setting").select_option(label="SmolLM2-135M-Instruct, protocol aware")
    assert page.locator("#tasks-plots figure:visible").count() == 2
    assert page.locator("#tasks-plots .reference-label").all_text_contents() == ["full cache 0.50", "full cache 0.25"]
    samples_of(page)
    sync_api.expect(page.locator("#count")).to_have_text("4 answers")
