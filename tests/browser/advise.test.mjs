// Opens the page of an advice in a real Chromium and looks at it as a reader would.
//
//   ADVISE_HTML=advise.html npm test
//
// A missing page or browser is a failure, never a skip.

import assert from "node:assert/strict";
import { resolve } from "node:path";
import { after, before, test } from "node:test";
import { pathToFileURL } from "node:url";
import { launch, visit as visitPage } from "./chromium.mjs";

const url = pathToFileURL(resolve(process.env.ADVISE_HTML ?? "set ADVISE_HTML")).href;
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
        assert.equal(await page.evaluate(() => document.documentElement.dataset.theme), colorScheme);
        const cut = await page.locator("figure text").evaluateAll((texts) =>
          texts.filter((t) => t.getBoundingClientRect().right > innerWidth || t.getBoundingClientRect().left < 0).length);
        assert.equal(cut, 0, "labels");
      }));
  }
}

test("marks lie in their bars, and bars where the table says", () =>
  visit({ javaScriptEnabled: false }, async (page) => {
    const rows = await page.locator("#truths tbody tr").count();
    const truths = (await page.locator("#truths thead th").count()) - 1;
    const lanes = page.locator("#fig-sooner svg:has(circle)");
    assert.equal(await lanes.count(), rows);
    const zero = await page.locator("#fig-sooner .zero").first().evaluate((line) => line.getBoundingClientRect().left);
    const ends = (element) => element.evaluate((e) => [e.getBoundingClientRect().left, e.getBoundingClientRect().right]);
    for (let row = 0; row < rows; row++) {
      for (let truth = 0; truth < truths; truth++) {
        const group = lanes.nth(row).locator("g").nth(truth);
        const bar = await ends(group.locator("rect"));
        const mark = await ends(group.locator("circle"));
        const middle = (mark[0] + mark[1]) / 2;
        assert.ok(bar[0] - 1 <= middle && middle <= bar[1] + 1, `${row}, ${truth}: ${middle} in ${bar}`);
        const cell = page.locator(`#truths tbody tr:nth-child(${row + 1}) td:nth-child(${truth + 2})`);
        const low = parseFloat((await cell.innerText()).match(/\((−?[\d.]+)/)[1].replace("−", "-"));
        if (Math.abs(low) > 1) assert.equal(bar[0] > zero, low > 0, `${row}, ${truth}: ${low}`);
      }
    }
  }));
