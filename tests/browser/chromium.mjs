// A real Chromium, and what every page must keep to: nothing in the console, no request to others.

import assert from "node:assert/strict";
import { setTimeout as pause } from "node:timers/promises";
import { chromium } from "playwright-core";

/** Starts the browser; CHROMIUM says where it is. */
export const launch = () => chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync"],
});

/**
 * Opens a page, runs `look`, and fails on errors in the console that are not `expected` and on requests
 * that are not `allowed`: by default only that for the page itself.
 */
export async function visit(browser, url, look, { allowed = (asked) => asked === url, expected = /^$/, ...options } = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  const page = await context.newPage();
  const complaints = [];
  page.on("console", (message) => {
    const text = message.text();
    if (["error", "warning"].includes(message.type()) && !expected.test(text)) complaints.push(`${message.type()}: ${text}`);
  });
  page.on("pageerror", (error) => complaints.push(`exception: ${error.message}`));
  page.on("request", (request) => {
    if (!allowed(request.url())) complaints.push(`request: ${request.url()}`);
  });
  try {
    await page.goto(url);
    await look(page);
    assert.deepEqual(complaints, []);
  } finally {
    await context.close();
  }
}

/** Waits until something holds, and returns it. */
export async function until(holds, what, within_s = 40) {
  const end = Date.now() + within_s * 1000;
  for (;;) {
    const found = await holds();
    if (found) return found;
    assert.ok(Date.now() < end, `not within ${within_s} s: ${what}`);
    await pause(100);
  }
}

/** Violations of accessibility rules, in words. */
export async function accessible(page, axe) {
  // The policy of the page allows no scripts but its own; the debugger is not bound by it.
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ["violations"] }));
  assert.deepEqual(violations.map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.target.join(" ")).slice(0, 3)}`), []);
}

/** The page on a phone: all text of its tables is there, and nothing has to be moved to be read. */
export async function fitsPhone(page) {
  await page.setViewportSize({ width: 400, height: 860 });
  await pause(700);
  const found = await page.evaluate(() => {
    const cut = (cell) => cell.scrollWidth > cell.clientWidth || cell.scrollHeight > cell.clientHeight + 1;
    const shown = [...document.querySelectorAll("main tbody :is(th, td, button)")].filter((cell) => cell.getClientRects().length > 0);
    return { wide: document.documentElement.scrollWidth, cells: shown.length, cut: shown.filter(cut).map((cell) => cell.textContent) };
  });
  assert.ok(found.wide <= 400, `the page is ${found.wide} px wide on a phone`);
  assert.ok(found.cells > 5, "there are no cells");
  assert.deepEqual(found.cut, []);
}
