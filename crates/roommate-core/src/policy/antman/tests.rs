//! Charts and properties of AntMan.

use crate::event::{Action, Event};
use crate::idx::{IdxVec, JobIdx};
use crate::interference::{Estimate, Interference, Truth};
use crate::job::Class;
use crate::journal::{self, Observer, StepView};
use crate::knobs::Knobs;
use crate::math::rng::Rng;
use crate::state::State;
use crate::testing::{Outcome, TestCase};
use crate::time::Time;
use expect_test::{Expect, expect};
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Every job on a shared GPU has this speed.
struct SharedSpeed(f64);

impl Truth for SharedSpeed {}

impl Interference for SharedSpeed {
    fn speed(&self, _: &State, _: u8, tenants: &[(JobIdx, Knobs)], _: usize) -> Estimate {
        Estimate::certain(if tenants.len() > 1 { self.0 } else { 1.0 })
    }
}

/// A case in which jobs with lower-case names are opportunistic, the others resource-guarantee
/// jobs.
fn case(cluster: &str, jobs: &str, params: serde_json::Value) -> TestCase {
    let mut case = TestCase::new("antman", cluster, jobs);
    let serde_json::Value::Object(params) = params else { panic!("parameters are an object") };
    case.params = params;
    case.truth = Arc::new(SharedSpeed(1.0));
    for job in &mut case.jobs {
        if job.name.starts_with(char::is_lowercase) {
            job.spec.class = Class::BestEffort;
        }
    }
    case
}

fn draw(case: &TestCase, expected: &Expect) {
    let outcome = case.run();
    assert!(outcome.ended);
    let mut text = outcome.chart();
    for (job, end) in case.jobs.iter().zip(&outcome.finished) {
        text += &format!("{} ends at {}\n", job.name, end.expect("all ended"));
    }
    expected.assert_eq(&text);
}

/// When each job first started, by name.
fn starts(case: &TestCase, outcome: &Outcome) -> BTreeMap<String, Time> {
    struct Starts(IdxVec<JobIdx, Option<Time>>);
    impl Observer for Starts {
        fn job(&mut self, _: &journal::JobLine) {
            self.0.push(None);
        }
        fn step(&mut self, step: &StepView<'_>) {
            for fact in step.facts {
                if let Event::Started(job) = fact {
                    self.0[*job].get_or_insert(step.at);
                }
            }
        }
    }
    let mut starts = Starts(IdxVec::new());
    journal::read(outcome.journal.as_bytes(), &mut starts).expect("the journal is valid");
    let named = case.jobs.iter().zip(&starts.0);
    named.filter_map(|(a, at)| Some((a.name.clone(), (*at)?))).collect()
}

#[test]
fn a_team_does_not_exceed_its_quota() {
    for (quota, third) in [(json!(null), 0.0), (json!(2), 10.0)] {
        let case = case("1x4", "A 0 1 10, B 0 1 10, C 0 1 10", json!({"quota_gpus": quota}));
        let starts = starts(&case, &case.run());
        assert_eq!(starts["C"].secs(), third, "{quota}: {starts:?}");
    }
}

#[test]
fn an_opportunistic_job_is_throttled_and_recovers() {
    // At full speed each job loses 2 %; R may lose 1 %, so the throttle settles near one half.
    let mut throttled = case("1x1", "o 0 1 60, R 20 1 40", json!({}));
    throttled.truth = Arc::new(SharedSpeed(0.98));
    draw(
        &throttled,
        &expect![[r#"
        gpu0  aaaaaaaaaaaaaaaaaaaa#########################################aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
        o ends at 98
        R ends at 61
    "#]],
    );
}

#[test]
fn reserved_gpus_run_opportunistic_jobs() {
    let case = case("1x4", "A 0 2 6, B 1 4 4, o 2 1 5", json!({}));
    draw(
        &case,
        &expect![[r#"
        gpu0  aaaaaabbbb
        gpu1  aaaaaabbbb
        gpu2  ..cccc####c
        gpu3  ......bbbb
        A ends at 6
        B ends at 10
        o ends at 11
    "#]],
    );
}

#[test]
fn a_burst_of_jobs_is_spread_over_gpus() {
    // Utilisation 30 % each and a limit of 80 %: three jobs to a GPU; the seventh waits.
    let jobs = "a 0 1 9, b 0 1 9, c 0 1 9, d 0 1 9, e 0 1 9, f 0 1 9, g 0 1 9";
    draw(
        &case("1x2", jobs, json!({})),
        &expect![[r#"
        gpu0  #########ggggggggg
        gpu1  #########
        a ends at 9
        b ends at 9
        c ends at 9
        d ends at 9
        e ends at 9
        f ends at 9
        g ends at 18
    "#]],
    );
}

#[test]
fn opportunistic_memory_shrinks_and_grows_back() {
    let mut case = case("1x1:v100", "o 0 1 30, R 5 1 10", json!({"min_memory": 0.1}));
    case.jobs[0].spec.knobs.mem_mib = 12_000;
    case.jobs[1].spec.knobs.mem_mib = 9_000;
    let outcome = case.run();
    let tunes: Vec<&str> = outcome.journal.lines().filter(|l| l.contains("{\"tune\"")).collect();
    assert_eq!(tunes.len(), 2, "{tunes:#?}");
    // 16384 MiB less the memory of R and a margin of a tenth, then all that o asked for.
    assert!(tunes[0].contains("\"mem_mib\":6484"), "{tunes:#?}");
    assert!(tunes[1].contains("\"mem_mib\":12000"), "{tunes:#?}");
}

#[test]
fn a_job_started_as_opportunistic_is_upgraded_in_place() {
    let jobs = "A 0 1 20, B 0 1 20";
    let case = case("1x1", jobs, json!({"wait_to_opportunist_s": 5.0}));
    let outcome = case.run();
    let upgraded = outcome.journal.matches("upgraded").count();
    let starts = outcome.journal.matches("{\"start\":").count();
    assert_eq!((upgraded, starts), (1, 2), "{}", outcome.journal);
    assert_eq!(outcome.metrics().preemptions, 0);
}

/// Random mixes of both classes on a few GPUs with a random speed of shared GPUs.
fn mix(seed: u64, params: serde_json::Value) -> TestCase {
    let mut rng = Rng::stream(seed, 1);
    let mut jobs = String::new();
    for i in 0..2 + rng.below(8) {
        let class = if rng.chance(0.5) { 'r' } else { 'R' };
        let (submit, gpus, work) = (rng.below(40), 1 + rng.below(4), 1 + rng.below(60));
        let comma = if i > 0 { "," } else { "" };
        jobs += &format!("{comma}{class}{i} {submit} {gpus} {work}");
    }
    let clusters = ["1x4", "2x4", "3x4"];
    let mut case = case(clusters[rng.below(3) as usize], &jobs, params);
    case.truth = Arc::new(SharedSpeed(0.3 + 0.7 * rng.below(8) as f64 / 7.0));
    case
}

fn is_guaranteed(name: &str) -> bool {
    name.starts_with('R')
}

#[test]
fn no_guaranteed_job_is_slower_than_its_bound() {
    for seed in 0..600 {
        let eps = [0.0, 0.01, 0.1][seed as usize % 3];
        let case = mix(seed, json!({"eps": eps, "wait_to_opportunist_s": null}));
        let outcome = case.run();
        let starts = starts(&case, &outcome);
        for (job, end) in case.jobs.iter().zip(&outcome.finished) {
            if is_guaranteed(&job.name) {
                let ran = end.expect("all ended") as f64 - starts[&job.name].secs();
                let most = (job.work * (1.0 + eps)).ceil();
                assert!(ran <= most + 1e-6, "seed {seed}: {} ran {ran} s > {most}", job.name);
            }
        }
    }
}

#[test]
fn opportunistic_jobs_delay_no_guaranteed_start() {
    for seed in 0..400 {
        let params = json!({"eps": 0.0, "wait_to_opportunist_s": null});
        let with = mix(seed, params.clone());
        let mut without = mix(seed, params);
        without.jobs.retain(|a| is_guaranteed(&a.name));
        if without.jobs.is_empty() {
            continue;
        }
        let mut guaranteed = starts(&with, &with.run());
        guaranteed.retain(|name, _| is_guaranteed(name));
        assert_eq!(guaranteed, starts(&without, &without.run()), "seed {seed}");
    }
}

#[test]
fn without_opportunistic_jobs_antman_is_fifo() {
    for seed in 0..300 {
        let mut antman = mix(seed, json!({"wait_to_opportunist_s": null}));
        antman.jobs.iter_mut().for_each(|a| a.spec.class = Class::Guaranteed);
        let ends = antman.run().finished;
        antman.policy = "fifo".into();
        antman.params.clear();
        assert_eq!(ends, antman.run().finished, "seed {seed}");
    }
}

#[test]
fn a_gpu_guarantees_resources_to_at_most_one_job() {
    for seed in 0..300 {
        let case = mix(seed, json!({"wait_to_opportunist_s": 7.0}));
        case.run_looking(&mut |engine| {
            let state = engine.state();
            for gpu in &state.gpus {
                let promised = |j: &&JobIdx| state.job(**j).knobs.sm_permille > 0;
                assert!(gpu.tenants.iter().filter(promised).count() <= 1, "seed {seed}");
                let best_effort = |j: &&JobIdx| state.spec(**j).class == Class::BestEffort;
                assert!(!gpu.tenants.iter().filter(best_effort).any(|j| promised(&j)));
            }
        });
    }
}

#[test]
fn static_mode_holds_gpus_while_waiting() {
    // B holds the two GPUs beside A, so that C finds none; o runs on the GPU of least load.
    let jobs = "A 0 2 6, B 1 4 4, C 2 1 2, o 2 1 3";
    let case = case("1x4", jobs, json!({"mode": "static"}));
    draw(
        &case,
        &expect![[r#"
        gpu0  aaaaaabbbbcc
        gpu1  aaaaaabbbb
        gpu2  ..ddd.bbbb
        gpu3  ......bbbb
        A ends at 6
        B ends at 10
        C ends at 12
        o ends at 5
    "#]],
    );
    let moved = |a: &Action| matches!(a, Action::Move(..) | Action::Stop(_));
    case.run_looking(&mut |engine| {
        assert!(engine.look_again().actions.iter().all(|a| !moved(a)));
    });
}
