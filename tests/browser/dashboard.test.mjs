// The dashboard in a real Chromium: a real daemon with real jobs on cores, and journals.
//
//   ROOMMATE_BIN=target/release/roommate npm test
//   DASHBOARD_SHOTS=folder                           (keeps screenshots there)

import assert from "node:assert/strict";
import { spawn, spawnSync } from "node:child_process";
import { existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { after, before, describe, test } from "node:test";
import { setTimeout as pause } from "node:timers/promises";
import { launch, visit as visitPage } from "./chromium.mjs";

const root = resolve(import.meta.dirname, "../..");
const roommate = resolve(process.env.ROOMMATE_BIN ?? join(root, "target/release/roommate"));
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const shots = process.env.DASHBOARD_SHOTS;

const folder = mkdtempSync(join(tmpdir(), "rm-"));
const state = join(folder, "s");
const env = { ...process.env, ROOMMATE_STATE: state, PYTHONPATH: join(root, "python"), DISPLAY: "", WAYLAND_DISPLAY: "" };
const children = [];
let browser, live;

/** Starts the program, and waits for a line of its output. */
function begin(words, wanted) {
  const child = spawn(roommate, words, { env, cwd: folder, stdio: ["ignore", "pipe", "pipe"] });
  children.push(child);
  return new Promise((done, failed) => {
    let said = "";
    const hear = (text) => {
      said += text;
      const found = wanted.exec(said);
      if (found) done({ child, found: found[1] });
    };
    child.stdout.on("data", hear);
    child.stderr.on("data", hear);
    child.on("exit", () => failed(new Error(`roommate ${words.join(" ")} ended: ${said}`)));
  });
}

function run(...words) {
  const done = spawnSync(roommate, words, { env, cwd: folder, encoding: "utf8" });
  assert.equal(done.status, 0, `roommate ${words.join(" ")}: ${done.stderr}`);
  return done.stdout;
}

const view = async (...journals) => (await begin(["ui", "--no-open", ...journals], /(http:\S+)/)).found;
const jobs = () => Object.fromEntries(JSON.parse(run("ps", "-o", "json")).map((job) => [job.name, job]));

async function until(holds, what, within_s = 40) {
  const end = Date.now() + within_s * 1000;
  for (;;) {
    const found = await holds();
    if (found) return found;
    assert.ok(Date.now() < end, `not within ${within_s} s: ${what}`);
    await pause(100);
  }
}

/** A loop with the SDK, whose steps take as long as its batch is large. */
const TRAINS = `import roommate, time
def batch(size): time.sleep(size / 3200); return size
for _ in roommate.steps(batch, batch_size=32, min=8, max=128): pass
`;
const job = (name, fields) => JSON.stringify({ name, command: ["python3", "-c", TRAINS], batch: { size: 32, min: 8, max: 128 }, ...fields });

/** Opens a page, which may ask its own server only. */
function visit(link, look, options = {}) {
  const { origin } = new URL(link);
  return visitPage(browser, link, look, { viewport: { width: 1440, height: 900 }, allowed: (asked) => asked.startsWith(origin), ...options });
}

async function shot(page, name) {
  if (shots) await page.screenshot({ path: join(shots, `${name}.png`) });
}

/** Violations of accessibility rules, in words. */
async function accessible(page) {
  // The policy of the page allows no scripts but its own; the debugger is not bound by it.
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ["violations"] }));
  assert.deepEqual(violations.map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.target.join(" ")).slice(0, 3)}`), []);
}

const cells = (page, table, name) => page.evaluate(([of, job]) => {
  const row = [...document.querySelectorAll(`${of} tbody tr`)].find((tr) => tr.firstChild?.textContent === job);
  return row ? [...row.children].map((cell) => cell.textContent) : null;
}, [table, name]);

before(async () => {
  assert.ok(existsSync(roommate), `no program at ${roommate}: cargo build --release`);
  browser = await launch();
});

after(async () => {
  await browser?.close();
  // Jobs outlive a daemon that is merely killed.
  const ended = spawnSync(roommate, ["down", "--stop-jobs"], { env, encoding: "utf8" });
  for (const child of children) child.kill();
  assert.equal(ended.status, 0, ended.stderr);
  rmSync(folder, { recursive: true, force: true });
});

describe("a daemon", () => {
  let daemon, address;

  before(async () => {
    // No daemon yet: the command says what to do.
    const none = spawnSync(roommate, ["ui", "--no-open"], { env, encoding: "utf8" });
    assert.notEqual(none.status, 0);
    assert.match(none.stderr, /roommate up/);
    const started = await begin(["up", "--policy", "mps", "--devices", "2", "--http", "127.0.0.1:0", "--http-plain"], /http: (\S+)/);
    [daemon, address] = [started.child, started.found];
    live = await view();
  });

  test("a job is submitted, resized, suspended and cancelled from the page", async () => {
    await visit(live, async (page) => {
      await page.getByRole("button", { name: "New job" }).click();
      await page.getByLabel("Job file", { exact: true }).fill(job("first", { class: "best-effort" }));
      await page.getByRole("button", { name: "Submit" }).click();
      await until(async () => (await cells(page, "#running", "first"))?.[2] === "running", "the page shows it run");
      await until(() => jobs().first.batch === 32, "it reports its batch size");
      await page.locator("#running").getByRole("button", { name: "first" }).click();
      await until(async () => /started on/.test(await page.locator("#panel ol").innerText()), "the panel explains it");
      await page.getByRole("button", { name: "Resize…" }).click();
      await page.getByLabel("Batch size").fill("64");
      await page.getByRole("button", { name: "Resize", exact: true }).click();
      await until(() => jobs().first.batch === 64, "its batch size is 64");
      await until(async () => (await cells(page, "#running", "first"))[5] === "64", "the page shows the batch size");
      await page.getByRole("button", { name: "Suspend" }).click();
      await until(async () => (await cells(page, "#running", "first"))[2] === "suspended", "the page shows it suspended");
      await page.getByRole("button", { name: "Resume" }).click();
      await until(async () => (await cells(page, "#running", "first"))[2] === "running", "the page shows it run again");
      await shot(page, "panel");
      await page.getByRole("button", { name: "Cancel…" }).click();
      await page.getByRole("button", { name: "Cancel the job" }).click();
      await until(async () => (await cells(page, "#over", "first"))?.[1] === "cancelled", "the page shows its end");
      assert.ok(jobs().first.ended);
    });
  });

  test("a dropped job file is judged, and nothing is submitted", async () => {
    writeFileSync(join(folder, "busy.json"), job("busy", { devices: 2, class: "best-effort" }));
    run("submit", "busy.json");
    await until(() => jobs().busy.state === "running", "busy runs");
    await visit(live, async (page) => {
      await until(() => cells(page, "#running", "busy"), "the page shows busy");
      await page.evaluate((text) => {
        const data = new DataTransfer();
        data.items.add(new File([text], "dropped.yaml"));
        document.body.dispatchEvent(new DragEvent("drop", { bubbles: true, dataTransfer: data, cancelable: true }));
      }, job("dropped", { class: "best-effort" }));
      const answer = page.locator("dialog .answer");
      await until(async () => /An estimate/.test(await answer.innerText()), "there is a verdict");
      const said = await answer.innerText();
      assert.match(said, /It would (start at once on GPU [01]|wait)/);
      if (/start at once/.test(said)) assert.match(said, /busy\s+1\.00×/);
      await accessible(page);
      await shot(page, "what-if");
      assert.equal(jobs().dropped, undefined);
      await page.getByLabel("Job file", { exact: true }).fill("command: [sleep, '1']\ndevice: 2");
      await page.getByRole("button", { name: "What if?" }).click();
      await until(async () => /"device"/.test(await answer.locator(".bad").innerText().catch(() => "")), "the error says what is wrong");
    }, { expected: /422/ });
  });

  test("p99 recovers after a burst, while training is held back", async () => {
    const examples = join(root, "examples");
    const submit = (name, fields) => {
      writeFileSync(join(folder, `${name}.json`), JSON.stringify({ name, workdir: examples, ...fields }));
      run("submit", `${name}.json`);
    };
    run("cancel", "busy");
    const port = 18000 + Math.floor(Math.random() * 2000);
    submit("digits", { class: "service", command: ["python3", "serving/digits.py"], service: { slo: { p99: "100ms" }, port, max_batch: 16 } });
    for (const name of ["trains-a", "trains-b"]) {
      submit(name, { class: "best-effort", command: ["python3", "train.py", "--steps", "100000", "--hidden", "300"] });
    }
    await until(() => jobs().digits.service?.ready, "the service answers", 60);
    const load = spawn("python3", ["serving/load.py", "--url", `http://127.0.0.1:${port}/predict`, "--rate", "40", "--seconds", "24",
      "--burst", "5:50:4", "--objective-ms", "100", "--body", "@serving/seven.json"], { cwd: examples, env, stdio: "ignore" });
    children.push(load);
    await visit(live, async (page) => {
      const p99 = async () => Number(/p99 ([\d.]+) ms/.exec(await page.locator(".service b").innerText())?.[1] ?? NaN);
      let worst = 0, held = false;
      await until(async () => {
        const text = await page.locator(".service").innerText().catch(() => "");
        worst = Math.max(worst, (await p99().catch(() => 0)) || 0);
        // It may be over before the page is looked at again: the decision stays.
        held ||= /Held back for it: trains/.test(text) || /held back: job digits/.test(await page.locator("main").innerText());
        if (held && shots) await shot(page, "light");
        return load.exitCode !== null;
      }, "the load is over", 60);
      const after = await p99();
      console.log(`# p99: at worst ${worst} ms, after the burst ${after} ms; held back: ${held}`);
      // On a machine that is idle otherwise the burst may be answered in time beside training.
      assert.ok(held || worst <= 100, "no training was held back, though requests were late");
      assert.ok(after <= 100, `p99 is ${after} ms after the burst`);
      assert.match(await page.locator("#figures").innerText(), /1 of 1\s+services in time/);
      await accessible(page);
      await page.getByRole("button", { name: "Switch between light and dark" }).click();
      await accessible(page);
      await shot(page, "dark");
      await page.setViewportSize({ width: 400, height: 860 });
      await pause(700);
      const wide = await page.evaluate(() => document.documentElement.scrollWidth);
      assert.ok(wide <= 400, `the page is ${wide} px wide on a phone`);
      await accessible(page);
      await shot(page, "phone");
    });
  });

  test("the page of the daemon itself wants a token", async () => {
    const response = await fetch(address);
    assert.match(response.headers.get("content-security-policy"), /default-src 'none'; script-src 'self'/);
    assert.equal((await fetch(`${address}/v1/stream`)).status, 401);
    assert.equal((await fetch(`${address}/v1/ps`, { method: "POST" })).status, 401);
    const secret = readFileSync(join(state, "http-token"), "utf8").trim();
    await visit(address, async (page) => {
      await page.getByRole("textbox", { name: "Token" }).fill("wrong");
      await page.getByRole("button", { name: "Open" }).click();
      await until(async () => /wrong, expired/.test(await page.locator("dialog").innerText().catch(() => "")), "a wrong token is refused");
      await accessible(page);
      await page.getByRole("textbox", { name: "Token" }).fill(secret);
      await page.getByRole("button", { name: "Open" }).click();
      await until(() => cells(page, "#running", "digits"), "the page shows the service");
      assert.ok(!page.url().includes(secret));
    }, { expected: /401/ });
  });

  test("a token reads no more than it may, and no longer", async () => {
    const secret = run("token", "create", "--scope", "read", "--expires", "1h").trim().split(/\s/)[0];
    const headers = { Authorization: `Bearer ${secret}` };
    const submit = await fetch(`${address}/v1/draft`, {
      method: "POST", headers, body: JSON.stringify({ text: job("mine"), then: "submit", key: "k" }),
    });
    assert.equal(submit.status, 403);
    const response = await fetch(`${address}/v1/stream`, { headers });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    assert.match((await reader.read()).value, /^data: \{"now_s"/);
    const [{ id }] = JSON.parse(run("token", "list", "-o", "json")).filter((token) => token.scope === "read");
    run("token", "revoke", id);
    const end = Date.now() + 15_000;
    while (!(await reader.read()).done) assert.ok(Date.now() < end, "the stream goes on without a token");
  });

  test("ten viewers cost under 3 % of a core", async () => {
    const secret = readFileSync(join(state, "http-token"), "utf8").trim();
    const spent = () => {
      const [user, system] = readFileSync(`/proc/${daemon.pid}/stat`, "utf8").split(") ")[1].split(" ").slice(11, 13).map(Number);
      return (user + system) / 100;
    };
    const over = async (seconds) => {
      const [began, at] = [spent(), performance.now()];
      await pause(seconds * 1000);
      return (spent() - began) / ((performance.now() - at) / 1000);
    };
    const without = await over(10);
    const leaves = new AbortController();
    let bytes = 0;
    const viewers = Array.from({ length: 10 }, async () => {
      const response = await fetch(`${address}/v1/stream`, { headers: { Authorization: `Bearer ${secret}` }, signal: leaves.signal });
      assert.equal(response.status, 200);
      for await (const part of response.body) bytes += part.length;
    });
    await pause(2000);
    const first = bytes;
    const with_ = await over(20);
    leaves.abort();
    await Promise.allSettled(viewers);
    console.log(`# daemon: ${(without * 100).toFixed(2)} % of a core without viewers, ${(with_ * 100).toFixed(2)} % with ten`);
    assert.ok(bytes > first, "viewers were told nothing");
    assert.ok(with_ - without < 0.03, `ten viewers cost ${((with_ - without) * 100).toFixed(1)} % of a core`);
  });

  test("the first paint comes within 300 ms", async () => {
    const took = [];
    for (let n = 0; n < 5; n++) {
      await visit(live, async (page) => {
        const paint = () => page.evaluate(() => performance.getEntriesByName("first-contentful-paint")[0]?.startTime);
        took.push(await until(paint, "something is painted"));
      });
    }
    took.sort((a, b) => a - b);
    console.log(`# first paint: ${took.map((t) => Math.round(t)).join(", ")} ms`);
    assert.ok(took[2] < 300, `the first paint takes ${took[2]} ms`);
  });

  test("its journal is replayed with a slider", async () => {
    const copy = join(folder, "recorded.jsonl");
    writeFileSync(copy, readFileSync(join(state, "journal.jsonl")));
    await visit(await view(copy), async (page) => {
      const slider = page.getByRole("slider", { name: "Time" });
      await slider.waitFor();
      const running = () => page.locator("#running h2 span").innerText();
      await slider.fill("10000");
      await until(async () => Number(await running()) >= 3, "the service and the training run at the end");
      await slider.fill("0");
      await until(async () => (await running()) === "", "nothing runs at the beginning");
      await slider.fill("10000");
      await page.locator("#running").getByRole("button", { name: "digits" }).click();
      const panel = () => page.locator("#panel").innerText();
      await until(async () => /placed on GPU/.test(await panel()), "what became of the service is explained");
      assert.equal(await page.locator("#panel").getByRole("button", { name: "Cancel…" }).count(), 0);
      await accessible(page);
    });
  });
});

describe("journals", () => {
  const sim = (name, ...words) => {
    const path = join(folder, `${name}.jsonl`);
    run("sim", ...words, "--journal", path, "-o", "csv");
    return path;
  };

  test("two policies stand side by side", async () => {
    const trace = join(folder, "small-trace.jsonl");
    run("trace", "synth", "-n", "120", "--cluster", "2x4", "--load", "1.2", "--mix", "small", "--seed", "3", "-o", trace);
    const both = ["roommate", "tiresias"].map((policy) => sim(policy, trace, "--cluster", "2x4", "--policy", policy));
    await visit(await view(...both), async (page) => {
      await page.getByRole("slider", { name: "Time" }).waitFor();
      assert.equal(await page.locator(".lanes canvas").count(), 2);
      assert.match(await page.locator("#compare").innerText(), /mean completion time/);
      assert.ok((await page.locator("#compare td.better").count()) > 0);
      await page.locator(".lanes canvas").first().focus();
      await page.keyboard.press("ArrowDown");
      await page.keyboard.press("Enter");
      assert.ok(await page.locator("#panel").isVisible());
      await page.keyboard.press("Escape");
      assert.ok(await page.locator("#panel").isHidden());
      await pause(500);
      await accessible(page);
      await shot(page, "compare");
    });
  });

  test("a name that looks like markup is text", async () => {
    const path = sim("evil", "--cluster", "1x2", "--seed", "1");
    const evil = "<img src=x onerror='window.executed = 1'>";
    writeFileSync(path, readFileSync(path, "utf8").replace(/"name":"1"/, JSON.stringify({ name: evil }).slice(1, -1)));
    await visit(await view(path), async (page) => {
      const slider = page.getByRole("slider", { name: "Time" });
      await slider.waitFor();
      await slider.fill("10000");
      await page.getByLabel("Find").fill("<img");
      await until(() => cells(page, "#over", evil), "the name is shown");
      assert.equal(await page.evaluate(() => globalThis.executed), undefined);
    });
  });

  test("1,000 GPUs and 10,000 jobs are drawn within 16 ms", async () => {
    const trace = join(folder, "large-trace.jsonl");
    run("trace", "synth", "-n", "10000", "--cluster", "125x8", "--load", "1.1", "--mix", "helios", "--seed", "3", "-o", trace);
    const large = sim("large", trace, "--cluster", "125x8", "--policy", "roommate");
    await visit(await view(large), async (page) => {
      await page.getByRole("slider", { name: "Time" }).waitFor({ timeout: 60_000 });
      const sorted = await page.evaluate(async () => {
        const { frames, runs, seek } = globalThis.roommate;
        const next = () => new Promise((done) => { requestAnimationFrame(() => requestAnimationFrame(done)); });
        for (let n = 0; n < 90; n++) {
          seek((runs[0].end * n) / 90);
          document.querySelector(".lanes").scrollTop = n * 100;
          await next();
        }
        return frames().slice(-80).sort((a, b) => a - b);
      });
      const at = (part) => sorted[Math.floor(part * sorted.length)];
      console.log(`# frames with 1,000 GPUs: median ${at(0.5).toFixed(1)} ms, 95th percentile ${at(0.95).toFixed(1)} ms`);
      assert.ok(at(0.5) < 16, `a frame takes ${at(0.5)} ms`);
      await page.evaluate(() => { const { runs, seek } = globalThis.roommate; seek(runs[0].end * 0.5); document.querySelector(".lanes").scrollTop = 0; });
      await pause(500);
      assert.match(await page.locator("#figures").innerText(), /of 1000/);
      await accessible(page);
      await shot(page, "thousand");
    });
  });
});
