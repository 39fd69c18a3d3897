// The dashboard of a cluster in a real Chromium, for tests/kube/test_dashboard.py:
//
//   node cluster.mjs LINK NAMESPACE [TOKEN]       (DASHBOARD_SHOTS=folder keeps screenshots there)
//
// In the namespace `one` and `two` run, `waits` waits. With a token, the page asks for it.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { accessible as check, fitsPhone, launch, until, visit } from "./chromium.mjs";

const [link, space, token] = process.argv.slice(2);
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const { origin } = new URL(link);
const shots = process.env.DASHBOARD_SHOTS;
const PODS = `apiVersion: batch/v1
kind: Job
metadata: {name: asked, namespace: ${space}}
spec:
  parallelism: 2
  template:
    metadata: {annotations: {roommate.dev/gpu-share: "50"}}
    spec:
      schedulerName: roommate
      containers: [{name: main, image: any, resources: {limits: {roommate.dev/gpu: 1}}}]
`;

const browser = await launch();
try {
  await visit(browser, link, async (page) => {
    const shot = async (name) => { if (shots) await page.screenshot({ path: join(shots, `${name}.png`) }); };
    const text = (of) => page.locator(of).innerText();
    if (token) {
      await until(async () => /kubectl create token/.test(await text("dialog").catch(() => "")), "it asks for a token");
      await page.getByRole("textbox", { name: "Token" }).fill("wrong");
      await page.getByRole("button", { name: "Open" }).click();
      await page.waitForTimeout(1000);
      assert.match(await text("dialog"), /wrong, expired or revoked/);
      await page.getByRole("textbox", { name: "Token" }).fill(token);
      await page.getByRole("button", { name: "Open" }).click();
    }
    await until(async () => new RegExp(`${space}/one`).test(await text("#running").catch(() => "")), "a pod runs");
    await until(async () => new RegExp(`${space}/waits`).test(await text("#queue")), "a pod waits");
    assert.match(await text("#about"), /policy roommate/);
    await until(async () => /placed on GPU \S+\.\d/.test(await text("#decisions")), "a decision names its node");

    // What there is to know of a pod, and nothing to do to it.
    await page.locator("#running").getByRole("button", { name: `${space}/one` }).click();
    await until(async () => /started on node/.test(await text("#panel ol")), "the scheduler explains it");
    assert.deepEqual(await page.locator("#panel button").allInnerTexts(), ["Close"]);
    await check(page, axe);
    await shot("cluster-panel");
    await page.keyboard.press("Escape");

    await page.getByRole("button", { name: "What if?" }).click();
    assert.deepEqual(await page.locator("dialog .act button").allInnerTexts(), ["Close", "What if?"]);
    await page.getByLabel("Job file", { exact: true }).fill(PODS);
    await page.locator("dialog").getByRole("button", { name: "What if?" }).click();
    await until(async () => /An estimate/.test(await text("dialog .answer")), "there is a verdict");
    assert.match(await text("dialog .answer"), /It would (start at once on GPU|wait)/);
    assert.match(await text("dialog .answer"), new RegExp(`${space}/asked-1 would`));
    await check(page, axe);
    await shot("cluster-what-if");
    await page.getByLabel("Job file", { exact: true }).fill("kind: ConfigMap");
    await page.locator("dialog").getByRole("button", { name: "What if?" }).click();
    await until(async () => /it makes no pods/.test(await text("dialog .answer")), "it says what is wrong");
    await page.keyboard.press("Escape");

    await page.waitForTimeout(1000);
    await shot("cluster-light");
    await page.getByRole("button", { name: "Switch between light and dark" }).click();
    await check(page, axe);
    await page.waitForTimeout(600);
    await shot("cluster-dark");
    await fitsPhone(page);
    await check(page, axe);
    await shot("cluster-phone");
  }, { viewport: { width: 1440, height: 900 }, allowed: (asked) => asked.startsWith(origin), expected: /401|422/ });
} finally {
  await browser.close();
}
