//! The model of services beside training against runs of services on a real GPU (in `../shared`,
//! outside the repository). `serving.jsonl` is kept out of every fit; `gate.jsonl` and
//! `priority.jsonl` are in it. `docs/reference/serving.md` shows the result and is compared with
//! it. Without the measurements this test prints that it is skipped and passes, unless
//! `ROOMMATE_REQUIRE_SHARED=1`.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "this is a test")]

mod shared;

use roommate_core::idx::{JobIdx, ProfileIdx};
use roommate_core::interference::Interference as _;
use roommate_core::interference::Truth as _;
use roommate_core::interference::measured::{Measured, Work};
use roommate_core::job::Spec;
use roommate_core::knobs::Knobs;
use roommate_core::math::stat;
use roommate_core::measurement::atlas::Atlas;
use roommate_core::measurement::rows::TaskKind;
use roommate_core::profile::{Profile, Serving};
use roommate_core::state::{Costs, State};
use roommate_core::time::Span;
use roommate_sim::serving::trial::{Trial, sizes};
use roommate_sim::truth;
use serde_json::Value;
use shared::shared;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;

const SMS: f64 = 132.0;
/// The largest batch of the measured services.
const BATCH: u32 = 32;

fn rows(folder: &Path, name: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.join("measurements/h200").join(name)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn num(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

/// Two jobs and the truth about them; a service is the first.
struct Pair {
    truth: Measured,
    state: State,
    alone_s: f64,
}

/// The batch at which a training task was measured beside services.
fn usual_batch(task: &str) -> u32 {
    if task == "gpt2-lm" { 16 } else { 64 }
}

impl Pair {
    fn of_service(atlas: &Arc<Atlas>, service: &str, train: &str) -> Self {
        let task = atlas.task(TaskKind::Serve, &format!("{service}-graphs")).unwrap();
        let first = Work { task, batch: BATCH, load: 1.0 };
        let mut profile = Profile::of_step(atlas.batch_s(task, BATCH, None));
        profile.serving = Some(Serving {
            batch: BATCH,
            timeout: Span::ZERO,
            warm_up: Span::ZERO,
            base_mib: 0.0,
            item_mib: 0.0,
        });
        let task = atlas.task(TaskKind::Train, train);
        let second = task.map(|task| Work { task, batch: usual_batch(train), load: 1.0 });
        Self::new(atlas, vec![Some(first), second], vec![profile, Profile::of_step(1.0)])
    }

    fn of_training(atlas: &Arc<Atlas>, host: (&str, u32), guest: (&str, u32)) -> Self {
        let work = |(name, batch): (&str, u32)| {
            let task = atlas.task(TaskKind::Train, name).unwrap();
            Some(Work { task, batch, load: 1.0 })
        };
        Self::new(atlas, vec![work(host), work(guest)], vec![Profile::of_step(1.0); 2])
    }

    fn new(atlas: &Arc<Atlas>, works: Vec<Option<Work>>, profiles: Vec<Profile>) -> Self {
        let mut state = State::new(&"1x1".parse().unwrap(), Costs::default());
        let alone_s = profiles[0].step_s.get();
        state.specs = [0, 1].map(|p| Spec::training(1, 1.0, ProfileIdx(p))).into_iter().collect();
        state.profiles = profiles.into();
        Self { truth: Measured::new(Arc::clone(atlas), works.into()), state, alone_s }
    }

    fn speed(&self, knobs: [Knobs; 2], index: usize) -> f64 {
        let tenants = [(JobIdx(0), knobs[0]), (JobIdx(1), knobs[1])];
        self.truth.speed(&self.state, 0, &tenants, index).mean
    }

    /// Batch times of the service: beside the training task, and with it away.
    fn times(&self, knobs: [Knobs; 2]) -> [Vec<f64>; 2] {
        let beside =
            |n: u32| self.alone_s / self.speed([Knobs { batch: n, ..knobs[0] }, knobs[1]], 0);
        let alone = |n: u32| {
            let own = [(JobIdx(0), Knobs { batch: n, ..knobs[0] })];
            self.alone_s / self.truth.speed(&self.state, 0, &own, 0).mean
        };
        [sizes(BATCH).map(beside).collect(), sizes(BATCH).map(alone).collect()]
    }
}

/// The knobs of service and training in a mode of the measurements.
fn knobs(mode: &str, service_sms: f64, training_sms: f64) -> [Knobs; 2] {
    let permille = |sms: f64| (sms / SMS * 1000.0).round() as u16;
    let free = Knobs { sm_permille: 0, ..Knobs::WHOLE };
    if mode.starts_with("part") {
        return [service_sms, training_sms].map(|s| Knobs { sm_permille: permille(s), ..free });
    }
    let turns = mode == "slices";
    let priority = mode.starts_with("prio") || mode.starts_with("gate");
    [
        Knobs { turns, priority, ..free },
        Knobs { turns, sm_most_permille: permille(training_sms), ..free },
    ]
}

/// Predicted and measured 99th percentile in ms, and speed of training where there is one.
struct Compared {
    mode: String,
    what: String,
    saturated: bool,
    p99_ms: [f64; 2],
    train: Option<[f64; 2]>,
}

fn compare(atlas: &Arc<Atlas>, row: &Value, loads: &BTreeMap<String, f64>) -> Option<Compared> {
    let text = |name: &str| row[name].as_str();
    let (service, train, mode) = (text("service")?, text("train")?, text("mode")?);
    let load = num(&row["load"]);
    let rate = row["rate"].as_f64().unwrap_or_else(|| load * loads[service]);
    let unserved = num(&row["unserved"]);
    let span_s = (num(&row["n"]) + unserved) / rate;
    let mut pair = Pair::of_service(atlas, service, train);
    let sms = |name: &str| row[name].as_f64().unwrap_or(SMS);
    let knobs = knobs(mode, sms("s_sms"), sms("t_sms"));
    let [beside, alone] = pair.times(knobs);
    let trial = Trial {
        rate,
        span_s,
        batch: BATCH,
        fill_s: row["wait_ms"].as_f64().unwrap_or(0.0) / 1e3,
        beside_s: if train == "-" { &alone } else { &beside },
        alone_s: &alone,
        objective_s: mode.starts_with("gate").then_some(0.0),
    };
    let outcome = trial.run(1);
    let train_norm = row["train_norm"].as_f64().map(|measured| {
        let open = 1.0 - outcome.closed;
        pair.truth.set_load(JobIdx(0), (outcome.busy - outcome.closed).max(0.0) / open.max(1e-9));
        [pair.speed(knobs, 1) * open, measured]
    });
    let p99_ms = [outcome.p99_s * 1e3, num(&row["p99"])];
    Some(Compared {
        mode: mode.to_string(),
        what: format!("{service} {load} {train}"),
        saturated: p99_ms[1] > 50.0,
        p99_ms,
        train: train_norm,
    })
}

fn line(text: &mut String, name: &str, of: &[&Compared]) {
    let mut logs: Vec<f64> = of.iter().map(|c| (c.p99_ms[0] / c.p99_ms[1]).ln().abs()).collect();
    logs.sort_by(f64::total_cmp);
    let at = |q: f64| stat::quantile(&logs, q).map_or("-".into(), |v| format!("{v:.2}"));
    let train: Vec<f64> = of.iter().filter_map(|c| c.train.map(|t| (t[0] - t[1]).abs())).collect();
    let mae = stat::mean(&train).map_or("-".into(), |m| format!("{m:.3}"));
    writeln!(text, "| {name} | {} | {} | {} | {mae} |", of.len(), at(0.5), at(0.9)).unwrap();
}

#[test]
fn services_are_predicted_with_the_errors_that_the_docs_say() {
    let Some(folder) = shared() else { return };
    let atlas = Arc::new(truth::h200().unwrap());
    // Requests per second at a load of 1, for rows that do not say their rate.
    let mut loads = BTreeMap::new();
    for row in rows(&folder, "serving.jsonl") {
        let service = row["service"].as_str().unwrap().to_string();
        loads.insert(service, num(&row["rate"]) / num(&row["load"]));
    }
    let mut text = String::from(
        "| rows | runs | ln p99, median | p90 | training, mean |\n|---|---|---|---|---|\n",
    );
    for (file, title) in [("serving.jsonl", "held out"), ("gate.jsonl", "fitted")] {
        let all = rows(&folder, file);
        let all: Vec<Compared> = all.iter().filter_map(|r| compare(&atlas, r, &loads)).collect();
        for c in &all {
            let train = c.train.unwrap_or_default();
            eprintln!(
                "{:12} {:30} p99 {:7.1} {:7.1}  train {:.3} {:.3}",
                c.mode, c.what, c.p99_ms[0], c.p99_ms[1], train[0], train[1]
            );
        }
        let mut modes: Vec<&str> = Vec::new();
        for c in &all {
            if !modes.contains(&c.mode.as_str()) {
                modes.push(&c.mode);
            }
        }
        for mode in modes {
            let of: Vec<&Compared> = all.iter().filter(|c| c.mode == mode).collect();
            line(&mut text, &format!("{title}: {mode}"), &of);
        }
        for (saturated, name) in [(false, "p99 up to 50 ms"), (true, "p99 above 50 ms")] {
            let of: Vec<&Compared> = all.iter().filter(|c| c.saturated == saturated).collect();
            line(&mut text, &format!("{title}: {name}"), &of);
        }
        line(&mut text, &format!("{title}: all"), &all.iter().collect::<Vec<_>>());
    }
    let page = include_str!("../../../docs/reference/serving.md");
    assert!(page.contains(&text), "docs/reference/serving.md should say\n{text}");
}

#[test]
fn pairs_of_training_under_priority_and_limits() {
    let Some(folder) = shared() else { return };
    let atlas = Arc::new(truth::h200().unwrap());
    let mut errors: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    let all = rows(&folder, "priority.jsonl");
    for row in &all {
        let text = |name: &str| row[name].as_str().unwrap();
        let batch = |name: &str| row[name].as_u64().unwrap() as u32;
        let (host, guest) = ((text("host"), batch("hb")), (text("guest"), batch("gb")));
        let pair = Pair::of_training(&atlas, host, guest);
        let mode = text("mode");
        let guest_sms = mode.split_once("guest").map_or(SMS, |(_, sms)| sms.parse().unwrap());
        let priority = mode != "mps";
        let mut knobs = knobs("caps", SMS, guest_sms);
        knobs[0].priority = priority;
        for (i, side) in ["host_norm", "guest_norm"].into_iter().enumerate() {
            let off = (pair.speed(knobs, i) - num(&row[side])).abs();
            errors
                .entry(if guest_sms < SMS {
                    mode
                } else if priority {
                    "priority"
                } else {
                    mode
                })
                .or_default()
                .push(off);
        }
    }
    let means: BTreeMap<&str, f64> =
        errors.iter().map(|(mode, e)| (*mode, stat::mean(e).unwrap())).collect();
    eprintln!("{means:.3?}");
    // What plain MPS is wrong by is the error of the contention model; mechanisms add little.
    assert!(means.values().all(|mean| *mean < means["mps"] + 0.03), "{means:?}");
}
