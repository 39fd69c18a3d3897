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
import { accessible as check, fitsPhone, launch, until, visit as visitPage } from "./chromium.mjs";

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

/** A loop with the SDK, whose steps take as long as its batch is large. */
const TRAINS = `import roommate, time
def batch(size): time.sleep(size / 3200); return size
for _ in roommate.steps(batch, batch_size=32, min=8, max=128): pass
`;
/** A service whose requests take a fixed CPU time each, so that it is known how many are too many. */
const MOST_PER_S = 50;
const SERVES = `import roommate, time
def predict(requests):
    end = time.thread_time() + len(requests) / ${MOST_PER_S}
    while time.thread_time() < end: pass
    return [{"answer": 42} for _ in requests]
roommate.serve(predict, warm=lambda: predict([{}]))
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

const accessible = (page) => check(page, axe);

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

  test("the past of a live page is looked at, and left with a key", async () => {
    await visit(live, async (page) => {
      const slider = page.getByRole("slider", { name: "Time" });
      await until(() => cells(page, "#over", "first"), "the page knows the job that ended");
      const value = await page.evaluate(() => {
        const [run] = globalThis.roommate.runs;
        const ran = run.byName.get("first").phases.findLast((phase) => phase.state === "running").t;
        const begin = Math.max(0, run.now() - 900);
        return Math.ceil(((ran - begin) / (run.now() - begin)) * 10000);
      });
      await slider.fill(String(value));
      await until(async () => (await cells(page, "#running", "first"))?.[2] === "running", "it ran then");
      assert.equal(await page.locator("#link").innerText(), "paused");
      await page.locator("#running").getByRole("button", { name: "first" }).click();
      assert.equal(await page.locator("#panel").getByRole("button", { name: "Cancel…" }).count(), 0);
      await page.keyboard.press("Escape");
      await pause(1500);
      assert.match(await page.locator("#time").innerText(), /:\d\d, .* ago/);
      await accessible(page);
      await shot(page, "past");
      await slider.focus();
      await page.keyboard.press(" ");
      await until(async () => (await page.locator("#link").innerText()) === "live", "the page is live again");
      await until(async () => (await cells(page, "#running", "first")) === null, "it runs no longer");
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
    const submit = (name, fields) => {
      writeFileSync(join(folder, `${name}.json`), JSON.stringify({ name, ...fields }));
      run("submit", `${name}.json`);
    };
    run("cancel", "busy");
    const port = 18000 + Math.floor(Math.random() * 2000), url = `http://127.0.0.1:${port}/predict`, objective = 200;
    submit("digits", { class: "service", command: ["python3", "-c", SERVES], service: { slo: { p99: `${objective}ms` }, port, max_batch: 4 } });
    for (const name of ["trains-a", "trains-b"]) {
      submit(name, { class: "best-effort", command: ["python3", "train.py", "--steps", "100000", "--hidden", "300"], workdir: join(root, "examples") });
    }
    await until(() => jobs().digits.service?.ready && jobs()["trains-b"].state === "running", "the service answers beside training", 60);
    // Twice as many requests as can be answered: after three seconds many are late.
    const load = spawn("python3", ["serving/load.py", "--url", url, "--rate", String(MOST_PER_S / 5), "--seconds", "40",
      "--burst", "4:10:3", "--body", "{}"], { cwd: join(root, "examples"), env, stdio: "ignore" });
    children.push(load);
    await visit(live, async (page) => {
      const p99 = async () => Number(/p99 ([\d.]+) ms/.exec(await page.locator(".service b").innerText())?.[1] ?? NaN);
      let worst = 0, held = false;
      const look = async () => {
        const text = await page.locator("main").innerText();
        held ||= /Held back for it: trains/.test(text) || /held back: job digits/.test(text);
        const now = await p99().catch(() => NaN);
        worst = Math.max(worst, now || 0);
        return now;
      };
      await until(async () => (await look()) > objective, "requests are late in the burst", 30);
      await until(async () => { await look(); return held; }, "training is held back", 20);
      if (shots) await shot(page, "light");
      const after = await until(async () => { const now = await look(); return now <= objective && now; }, "p99 recovers", 40);
      console.log(`# p99: at worst ${worst} ms, after the burst ${after} ms`);
      assert.equal(load.exitCode, null, "it recovered only when nobody asked any more");
      assert.match(await page.locator("#figures").innerText(), /1 of 1\s+services in time/);
      await accessible(page);
      await page.getByRole("button", { name: "Switch between light and dark" }).click();
      await accessible(page);
      await shot(page, "dark");
      await fitsPhone(page);
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

  test("a trace is simulated with two policies", async () => {
    const trace = join(folder, "simulated-trace.jsonl");
    run("trace", "synth", "-n", "120", "--cluster", "2x4", "--load", "1.4", "--mix", "small", "--seed", "3", "-o", trace);
    await visit(await view(trace, "-p", "gandiva,roommate", "--cluster", "2x4"), async (page) => {
      await page.getByRole("slider", { name: "Time" }).waitFor();
      assert.deepEqual(await page.locator("#charts h3").allInnerTexts(), ["gandiva", "roommate"]);
      assert.match(await page.locator("#compare").innerText(), /mean completion time/);
      const colours = await page.evaluate(() => [...document.querySelectorAll(".dot")].map((dot) => dot.style.background));
      assert.ok(colours.length > 20 && colours.every((colour) => colour !== ""), "a job has no colour");
      await fitsPhone(page);
      await accessible(page);
      await shot(page, "compare-phone");
    });
    await visit(await view(trace, "-p", "fifo", "--cluster", "2x4"), async (page) => {
      await page.getByRole("slider", { name: "Time" }).waitFor();
      assert.equal(await page.locator(".lanes canvas").count(), 1);
    });
  });

  test("what cannot be simulated or shown is refused with advice", () => {
    const trace = join(folder, "small-trace.jsonl"), journal = sim("refused", "--cluster", "1x2", "--seed", "1");
    for (const [words, said] of [
      [[trace, "-p", "gandiva,nix"], /there is no policy "nix"\nhint: there are fifo,/],
      [[journal, "-p", "gandiva"], /this is a journal.*\nhint: leave out --policies/],
      [[trace, trace, "-p", "gandiva"], /simulates one trace, not two\nhint: /],
      [[trace, "-p", "all"], /not more\nhint: `roommate compare`/],
      [[trace], /it has no head\nhint: if it is a trace: roommate ui .* -p gandiva,roommate/],
      [[journal, "--cluster", "1x2"], /are for simulations\nhint: .*-p gandiva,roommate/],
    ]) {
      const done = spawnSync(roommate, ["ui", "--no-open", ...words], { env, encoding: "utf8", timeout: 10_000 });
      assert.equal(done.status, 2, words.join(" "));
      assert.match(done.stderr, said);
    }
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
