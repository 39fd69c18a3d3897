// A real Chromium, and what every page must keep to: nothing in the console, no request to others.

import assert from "node:assert/strict";
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
