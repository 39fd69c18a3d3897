// Opens the page of a trace study in a real Chromium and looks at it as a reader would.
//
//   STUDY_HTML=study.html npm test
//
// A missing page or browser is a failure, never a skip.

import assert from "node:assert/strict";
import { resolve } from "node:path";
import { after, before, test } from "node:test";
import { pathToFileURL } from "node:url";
import { launch, visit as visitPage } from "./chromium.mjs";

const url = pathToFileURL(resolve(process.env.STUDY_HTML ?? "set STUDY_HTML")).href;
let browser;

before(async () => {
  browser = await launch();
});

after(() => browser?.close());

const visit = (options, look) => visitPage(browser, url, look, options);

for (const width of [1280, 400]) {
  for (const colorScheme of ["light", "dark"]) {
    test(`fits ${width} px in ${colorScheme}`, () =>
      visit({ viewport: { width, height: 900 }, colorScheme }, async (page) => {
        assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), width);
        for (const id of ["run", "wait", "util"]) {
          assert.equal(await page.locator(`#fig-${id} .curve`).count(), 4, id);
          const cut = await page.locator(`#fig-${id} text`).evaluateAll((texts) =>
            texts.filter((t) => t.getBoundingClientRect().right > innerWidth).length);
          assert.equal(cut, 0, `labels of ${id}`);
        }
        assert.equal(await page.evaluate(() => document.documentElement.dataset.theme), colorScheme);
      }));
  }
}

test("bars are as long as the table beside them says", () =>
  visit({}, async (page) => {
    const shares = await page.locator("#sizes tbody tr:first-child data").evaluateAll((d) => d.map((x) => Number(x.value)));
    const card = page.locator("section:has(#sizes)");
    const widths = await card.locator(".lane").first().locator("rect").evaluateAll((rects) =>
      rects.map((r) => r.getBoundingClientRect().width / r.ownerSVGElement.getBoundingClientRect().width));
    assert.equal(widths.length, 2);
    widths.forEach((width, i) => assert.ok(Math.abs(width - shares[i + 1]) < 0.01, `${width} ${shares[i + 1]}`));
  }));

test("a size can be hidden in all figures, and values can be read", () =>
  visit({}, async (page) => {
    await page.locator("#fig-run .legend button").first().click();
    for (const id of ["run", "wait", "util"]) assert.equal(await page.locator(`#fig-${id} .curve`).count(), 3, id);
    await page.locator("#fig-util svg").first().hover();
    assert.match(await page.locator("#tip").innerText(), /at most .* busy/);
  }));

test("without scripts the tables and bars are there", () =>
  visit({ javaScriptEnabled: false }, async (page) => {
    assert.ok((await page.locator("table").count()) >= 10);
    assert.ok((await page.locator(".lane rect").count()) >= 20);
  }));
