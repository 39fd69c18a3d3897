// Opens reports in a real Chromium and looks at them as a reader would.
//
//   REPORT_HTML=report.html[:more.html] npm test     (paths as in PATH)
//   CHROMIUM=/usr/bin/chromium                       (where the browser is)
//
// A missing report or browser is a failure, never a skip.

import assert from "node:assert/strict";
import { existsSync, readFileSync } from "node:fs";
import { delimiter, resolve } from "node:path";
import { after, before, describe, test } from "node:test";
import { pathToFileURL } from "node:url";
import { launch, visit as visitPage } from "./chromium.mjs";

const reports = (process.env.REPORT_HTML ?? "").split(delimiter).filter(Boolean).map((path) => resolve(path));

/** Written into the page by text that was taken for markup. */
const EVIL = `</script><script>window.executed = 1</script><!--<img src=x onerror="window.executed = 1">`;

let browser;

before(async () => {
  assert.ok(reports.length > 0, "set REPORT_HTML to the report to check");
  for (const path of reports) assert.ok(existsSync(path), `no report at ${path}`);
  browser = await launch();
});

after(() => browser?.close());

const visit = (path, options, look) => visitPage(browser, pathToFileURL(path).href, look, options);

const embedded = (page) => page.evaluate(() => JSON.parse(document.getElementById("data").textContent));

/** The runs whose curves are drawn when the page opens. */
const drawnFirst = ({ runs, drawn }) => drawn.map((i) => runs[i]);

/** Unfolds the table of all figures, where it is folded. */
const unfold = (page) => page.locator("details").evaluateAll((all) => all.forEach((d) => (d.open = true)));

/** The part of a canvas that is neither blank nor grey, such as labels and grid lines are. */
const coloured = (page, selector) =>
  page.locator(selector).evaluate((canvas) => {
    // From a copy: reading the page's own canvas twice makes the browser complain to the console.
    const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
    copy.drawImage(canvas, 0, 0);
    const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
    let vivid = 0;
    for (let i = 0; i < data.length; i += 4) {
      const [r, g, b] = [data[i], data[i + 1], data[i + 2]];
      if (data[i + 3] > 0 && Math.max(r, g, b) - Math.min(r, g, b) > 30) vivid++;
    }
    return vivid / (data.length / 4);
  });

const picture = (page) => page.locator(".gantt .base").evaluate((canvas) => canvas.toDataURL());

const tip = (page) => page.locator("#tip").evaluate((tip) => (tip.hidden ? "" : tip.innerText));

/** Moves over the Gantt chart until the tooltip satisfies `wanted`; gives its text. */
async function hoverUntil(page, wanted) {
  const canvas = page.locator(".gantt .over");
  await canvas.scrollIntoViewIfNeeded();
  const box = await canvas.boundingBox();
  for (let y = 6; y < box.height - 30; y += Math.max(9, box.height / 20)) {
    for (let x = 70; x < box.width - 12; x += box.width / 30) {
      await page.mouse.move(box.x + x, box.y + y);
      const text = await tip(page);
      if (wanted(text)) return text;
    }
  }
  return assert.fail("no tooltip of the kind wanted anywhere on the Gantt chart");
}

/** Walks by key from stay to stay until one of `names` is shown; gives the tooltip's text. */
const walkUntil = (page, names, stays) =>
  page.locator(".gantt .over").evaluate((canvas, [wanted, most]) => {
    canvas.focus();
    for (let i = 0; i < most; i++) {
      canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
      const title = document.querySelector("#tip strong").textContent;
      if (wanted.includes(title)) return title;
    }
    return null;
  }, [names, stays]);

/** The lowest contrast ratio between text and what lies behind it, and where. */
const lowestContrast = (page) =>
  page.evaluate(() => {
    const pixel = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgba = (colour) => {
      pixel.clearRect(0, 0, 1, 1);
      pixel.fillStyle = colour;
      pixel.fillRect(0, 0, 1, 1);
      return [...pixel.getImageData(0, 0, 1, 1).data];
    };
    const behind = (element) => {
      for (let e = element; e; e = e.parentElement) {
        const colour = rgba(getComputedStyle(e).backgroundColor);
        if (colour[3] === 255) return colour;
      }
      return [255, 255, 255, 255];
    };
    const luminance = ([r, g, b]) => {
      const part = (v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
      return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
    };
    let lowest = { ratio: Infinity };
    const chosen = "body, h1, h2, p, a, th, td, td *, figcaption, footer, .plot text, .pick, .tabs button, .switch button, #theme";
    for (const element of document.querySelectorAll(chosen)) {
      if (!element.textContent.trim() || element.disabled) continue;
      const style = getComputedStyle(element);
      const front = luminance(rgba(element instanceof SVGElement ? style.fill : style.color));
      const back = luminance(behind(element));
      const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
      if (ratio < lowest.ratio) lowest = { ratio, where: `${element.tagName}: ${element.textContent.trim().slice(0, 40)}` };
    }
    return lowest;
  });

for (const path of reports.length ? reports : ["(none)"]) {
  describe(path, () => {
    test("opens without complaint and asks for nothing but itself", () =>
      visit(path, {}, async (page) => {
        assert.equal(await page.locator("h1").count(), 1);
        const source = readFileSync(path, "utf8");
        assert.ok(source.length < 5_000_000, `${source.length} characters`);
        assert.doesNotMatch(source, /<(script|link|img|iframe)[^>]+(src|href)=/i);
      }));

    test("the table has a column for each run and marks the best values", () =>
      visit(path, {}, async (page) => {
        const { runs } = await embedded(page);
        assert.ok(runs.length > 0, "the report has no runs");
        await unfold(page);
        const heads = await page.locator("#metrics thead th").allInnerTexts();
        assert.deepEqual(heads.slice(1).map((h) => h.trim()), runs.map((run) => run.label));
        let starred = 0;
        for (const row of await page.locator("#metrics tbody tr").all()) {
          const cells = await row.locator("td").evaluateAll((tds) =>
            tds.map((td) => ({
              value: td.querySelector("data")?.value, text: td.innerText,
              best: td.classList.contains("best"), weight: Number(getComputedStyle(td).fontWeight),
            })));
          assert.equal(cells.length, runs.length);
          const words = await row.locator("th").innerText();
          const values = cells.filter((c) => c.value !== undefined).map((c) => Number(c.value));
          const race = Math.min(...values) < Math.max(...values) && /better/.test(words);
          const winner = /lower is better/.test(words) ? Math.min(...values) : Math.max(...values);
          for (const cell of cells) {
            assert.equal(cell.best, race && Number(cell.value) === winner, `${words}: ${cell.text}`);
            assert.equal(cell.text.includes("★"), cell.best, words);
            if (cell.best) assert.ok(cell.weight >= 600, "the best value is bold");
            starred += cell.best;
          }
        }
        if (runs.length > 1) assert.ok(starred > 0, "runs differ, yet nothing is marked");
      }));

    test("the league comes first, sorted, with bars as long as its values", () =>
      visit(path, {}, async (page) => {
        const { runs, drawn } = await embedded(page);
        const rows = page.locator("#league tbody tr");
        assert.equal(await rows.count(), runs.length > 1 ? runs.length : 0);
        if (runs.length === 1) return;
        assert.equal(await page.locator("main table").first().getAttribute("id"), "league");
        const cells = await rows.evaluateAll((all) => all.map((row) => [...row.querySelectorAll("td:has(data)")].map((td) => ({
          value: Number(td.querySelector("data").value), best: td.classList.contains("best"), star: td.innerText.includes("★"),
          bar: td.querySelector(".meter rect").getBoundingClientRect().width / td.querySelector(".meter").getBoundingClientRect().width,
        }))));
        const first = cells.map((row) => row[0].value);
        assert.deepEqual(first, [...first].sort((a, b) => a - b), "the shortest mean completion time comes first");
        assert.ok(cells[0][0].best && cells.flat().every((c) => c.best === c.star));
        const longest = Math.max(...first);
        cells.forEach(([jct]) => assert.ok(Math.abs(jct.bar - jct.value / longest) < 0.01, `${jct.bar} for ${jct.value}`));
        const names = await page.locator("#league .pick").allInnerTexts();
        assert.deepEqual(names.slice(0, drawn.length), drawn.map((i) => runs[i].label), "the best are drawn");
        assert.match(await rows.first().innerText(), /yes|no/);
      }));

    test("at most six runs are drawn, and a click chooses others", () =>
      visit(path, {}, async (page) => {
        const { runs, drawn } = await embedded(page);
        assert.equal(drawn.length, Math.min(6, runs.length));
        const tallest = () => page.locator("#fig-queue .series path").evaluateAll((all) => Math.max(...all.map((p) => p.getBBox().height)));
        assert.ok((await tallest()) > 80, "the axis is as high as what is drawn");
        const shown = () => page.locator("#fig-queue .series").evaluateAll((all) => all.map((g) => Number(g.dataset.run)).sort((a, b) => a - b));
        assert.deepEqual(await shown(), [...drawn].sort((a, b) => a - b));
        const other = runs.findIndex((_, i) => !drawn.includes(i));
        if (other < 0) return;
        const worst = drawn[drawn.length - 1];
        const row = page.locator(`#league .pick[data-run="${other}"]`);
        assert.equal(await row.getAttribute("aria-pressed"), "false");
        await row.focus();
        await page.keyboard.press("Enter");
        assert.equal(await row.getAttribute("aria-pressed"), "true");
        assert.ok(await row.evaluate((button) => button === document.activeElement), "the focus stays");
        assert.deepEqual(await shown(), [...drawn.filter((i) => i !== worst), other].sort((a, b) => a - b));
        assert.equal(await page.locator("#said").textContent(), `${runs[other].label} is drawn instead of ${runs[worst].label}`);
        // Who was chosen stays in the legends, drawn or not.
        const legend = page.locator(`#fig-cdf .legend .pick[data-run="${other}"]`);
        await legend.click();
        assert.deepEqual(await shown(), drawn.filter((i) => i !== worst).sort((a, b) => a - b));
        assert.equal(await row.getAttribute("aria-pressed"), "false");
        await legend.click();
        assert.ok((await shown()).includes(other));
        const looks = await page.locator("#fig-cdf path.curve").evaluateAll((all) => all.map((p) => p.getAttribute("stroke")));
        assert.equal(new Set(looks).size, looks.length, "no two curves have one colour");
      }));

    test("each figure drew something and says what in words", () =>
      visit(path, {}, async (page) => {
        const data = await embedded(page);
        const runs = drawnFirst(data);
        for (const id of ["cdf", "queue", "busy"]) {
          const curves = await page.locator(`#fig-${id} path.curve`).evaluateAll((paths) => paths.map((p) => p.getTotalLength()));
          const drawable = runs.filter((run) => run[id].x.length > 0).length;
          assert.equal(curves.length, drawable, id);
          assert.ok(drawable > 0 && curves.every((length) => length > 10), `${id}: ${curves}`);
          const looks = await page.locator(`#fig-${id} path.curve`).evaluateAll((paths) =>
            paths.map((p) => `${p.getAttribute("stroke")} ${p.getAttribute("stroke-dasharray")}`));
          assert.equal(new Set(looks).size, looks.length, "no two curves look alike");
          assert.ok((await page.locator(`#fig-${id} .plot svg desc`).textContent()).length > 30);
        }
        assert.ok((await coloured(page, ".gantt .base")) > 0.002, "the Gantt chart is blank");
        assert.ok((await page.locator("#gantt-caption").innerText()).includes(data.runs[0].label));
      }));

    test("pointing at a curve tells the value of each run", () =>
      visit(path, {}, async (page) => {
        const runs = drawnFirst(await embedded(page));
        for (const id of ["cdf", "queue", "busy"]) {
          const plot = page.locator(`#fig-${id} .plot svg`);
          await plot.scrollIntoViewIfNeeded();
          const box = await plot.boundingBox();
          await page.mouse.move(box.x + box.width * 0.4, box.y + box.height / 2);
          const text = await tip(page);
          for (const run of runs.filter((r) => r[id].x.length > 0)) assert.ok(text.includes(run.label), `${id}: ${text}`);
          assert.match(text, { cdf: /\d %/, queue: /\d jobs?|ended/, busy: /\d GPUs?|ended/ }[id]);
        }
        await page.locator("#fig-cdf .plot svg").focus();
        await page.keyboard.press("ArrowRight");
        assert.ok((await page.locator("#said").textContent()).includes(runs[0].label), "keys read values out");
      }));

    test("pointing at the Gantt chart tells the job, and keys do too", () =>
      visit(path, {}, async (page) => {
        const { runs, names } = await embedded(page);
        if (runs[0].gantt.kind === "heat") {
          assert.match(await page.locator("#gantt-caption").innerText(), /condensed/);
          assert.match(await hoverUntil(page, (text) => / % of the time in use/.test(text)), /GPU.*\d/);
          return;
        }
        const jobs = new Set(runs[0].gantt.job_name.map((id) => names[id]));
        const text = await hoverUntil(page, (shown) => jobs.has(shown.split("\n")[0]));
        assert.match(text, /\d.* – .*\d/);
        assert.match(text, /GPUs? \d+.*node \d+/);
        await page.locator(".gantt .over").focus();
        await page.keyboard.press("ArrowRight");
        assert.ok(jobs.has((await tip(page)).split("\n")[0]));
        assert.match(await page.locator("#said").textContent(), /GPU/);
      }));

    test("tabs switch the run, by pointer and by key", () =>
      visit(path, {}, async (page) => {
        const { runs } = await embedded(page);
        const tabs = page.locator("[role=tab]");
        assert.equal(await tabs.count(), runs.length);
        for (let i = runs.length - 1; i >= 0; i--) {
          await tabs.nth(i).click();
          assert.equal(await tabs.nth(i).getAttribute("aria-selected"), "true");
          assert.equal(await page.locator("[role=tab][aria-selected=true]").count(), 1);
          assert.equal(await page.locator("#gantt-caption").innerText(), runs[i].caption);
          assert.ok((await coloured(page, ".gantt .base")) > 0.002, runs[i].label);
        }
        const different = runs.findIndex((run) => JSON.stringify(run.gantt) !== JSON.stringify(runs[0].gantt));
        if (different > 0) {
          const first = await picture(page);
          await tabs.nth(different).click();
          assert.notEqual(await picture(page), first);
        }
        if (runs.length > 1) {
          await tabs.nth(0).click();
          await page.keyboard.press("ArrowRight");
          assert.equal(await tabs.nth(1).getAttribute("aria-selected"), "true");
        }
      }));

    test("dragging and the wheel zoom, the button resets", () =>
      visit(path, {}, async (page) => {
        const canvas = page.locator(".gantt .over");
        await canvas.scrollIntoViewIfNeeded();
        const box = await canvas.boundingBox();
        const before = await picture(page);
        const y = box.y + Math.min(30, box.height / 3);
        await page.mouse.move(box.x + box.width * 0.4, y);
        await page.mouse.down();
        await page.mouse.move(box.x + box.width * 0.6, y, { steps: 4 });
        await page.mouse.up();
        assert.notEqual(await picture(page), before, "a drag zooms");
        await page.locator("#zoom-reset").click();
        assert.equal(await picture(page), before, "reset shows the whole run again");
        assert.ok(await page.locator("#zoom-reset").isDisabled());
        await page.mouse.move(box.x + box.width * 0.5, y);
        await page.keyboard.down("Control");
        await page.mouse.wheel(0, -300);
        await page.keyboard.up("Control");
        await page.waitForFunction(() => !document.getElementById("zoom-reset").disabled);
      }));

    test("the switch between log and linear changes the axis", () =>
      visit(path, {}, async (page) => {
        const state = () =>
          page.locator("#fig-cdf .plot svg").evaluate((svg) => ({
            scale: svg.dataset.scale, curve: svg.querySelector("path.curve").getAttribute("d"),
            ticks: [...svg.querySelectorAll(".tick-x")].map((t) => `${t.textContent}@${t.getAttribute("x")}`).join(),
          }));
        const log = await state();
        assert.equal(log.scale, "log");
        await page.locator("#x-linear").click();
        const linear = await state();
        assert.equal(linear.scale, "linear");
        assert.notEqual(linear.ticks, log.ticks);
        assert.notEqual(linear.curve, log.curve);
        await page.locator("#x-log").click();
        assert.deepEqual(await state(), log);
      }));

    test("the legend hides a run in all line figures", () =>
      visit(path, {}, async (page) => {
        const count = () => page.locator(".plot path.curve").count();
        const all = await count();
        const button = page.locator("#fig-queue .legend button").first();
        await button.click();
        assert.ok((await count()) < all);
        assert.equal(await page.locator("#fig-busy .legend button").first().getAttribute("aria-pressed"), "false");
        await button.click();
        assert.equal(await count(), all);
      }));

    for (const colorScheme of ["light", "dark"]) {
      test(`text is readable in ${colorScheme}, and the toggle turns it over`, () =>
        visit(path, { colorScheme }, async (page) => {
          const light = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor.match(/\d+/g).every((v) => v > 128));
          assert.equal(await light(), colorScheme === "light");
          const found = await lowestContrast(page);
          assert.ok(found.ratio >= 4.5, `${found.ratio.toFixed(2)} at ${found.where}`);
          const before = await picture(page);
          await page.locator("#theme").click();
          assert.equal(await light(), colorScheme !== "light");
          assert.notEqual(await picture(page), before, "the canvas follows");
          const turned = await lowestContrast(page);
          assert.ok(turned.ratio >= 4.5, `${turned.ratio.toFixed(2)} at ${turned.where}`);
        }));
    }

    for (const width of [400, 1280]) {
      test(`nothing sticks out of a window ${width} px wide`, () =>
        visit(path, { viewport: { width, height: 800 } }, async (page) => {
          const widest = await page.evaluate(() => Math.max(document.body.scrollWidth, document.documentElement.scrollWidth));
          assert.ok(widest <= width, `${widest} px`);
        }));
    }

    test("text is text, whatever it says", () =>
      visit(path, {}, async (page) => {
        assert.equal(await page.evaluate(() => window.executed ?? window.pwned), undefined);
        assert.equal(await page.locator("script").count(), 2);
        assert.equal(await page.locator("body img").count(), 0);
        const { runs, names } = await embedded(page);
        const strange = runs[0].gantt.kind === "stays"
          ? runs[0].gantt.job_name.map((id) => names[id]).filter((name) => name.includes("<")) : [];
        if (strange.length > 0) assert.ok(await walkUntil(page, strange, runs[0].gantt.job.length), "shown as it is written");
        assert.equal(await page.evaluate(() => window.executed ?? window.pwned), undefined);
      }));

    test("a malicious job name is shown, not executed", () =>
      visit(path, {}, async (page) => {
        // The same report, with every name replaced before the script reads it.
        const safe = JSON.stringify(EVIL).slice(1, -1).replaceAll("<", "\\u003c");
        const source = readFileSync(path, "utf8");
        const data = /(<script type="application\/json" id="data">)(.*?)(<\/script>)/s.exec(source);
        const parsed = JSON.parse(data[2]);
        parsed.names = parsed.names.map(() => "NAME");
        const json = JSON.stringify(parsed).replaceAll("<", "\\u003c").replaceAll('"NAME"', () => `"${safe}"`);
        await page.setContent(source.replace(data[0], () => data[1] + json + data[3]));
        if (parsed.runs[0].gantt.kind === "stays") {
          assert.ok((await hoverUntil(page, (text) => text.includes("onerror"))).startsWith(EVIL));
        }
        assert.equal(await page.evaluate(() => window.executed), undefined);
        assert.equal(await page.locator("body img").count(), 0);
      }));

    test("prints on white, whatever the theme", () =>
      visit(path, { colorScheme: "dark" }, async (page) => {
        await page.evaluate(() => dispatchEvent(new Event("beforeprint")));
        assert.equal(await page.evaluate(() => document.documentElement.dataset.theme), "light");
        await page.evaluate(() => dispatchEvent(new Event("afterprint")));
        assert.equal(await page.evaluate(() => document.documentElement.dataset.theme), "dark");
        assert.ok((await page.pdf()).length > 10_000);
      }));
  });
}
