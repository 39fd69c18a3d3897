//! Charts of Horus, its costs and what it learns from samples.

use super::*;
use crate::engine::Engine;
use crate::event::{Action, Sample};
use crate::idx::{Idx, ProfileIdx};
use crate::interference::Undisturbed;
use crate::journal::{self, JobLine, Observer, StepView};
use crate::number::Number32;
use crate::profile::{Predicted, Profile};
use crate::testing::{Outcome, TestCase};
use expect_test::expect;
use std::sync::Arc;

/// A case in which every job has its own profile; its fifth word is its utilisation in percent,
/// `?` if unknown.
fn case(policy: &str, params: &str, cluster: &str, jobs: &str) -> TestCase {
    let (mut plain, mut utils) = (Vec::new(), BTreeMap::new());
    for job in jobs.split(',') {
        let (rest, util) = job.trim().rsplit_once(' ').unwrap();
        utils.insert(rest.split(' ').next().unwrap(), util.parse::<f64>().ok());
        plain.push(rest);
    }
    let mut case = TestCase::new(policy, cluster, &plain.join(","));
    case.params = serde_json::from_str(params).unwrap();
    for job in &mut case.jobs {
        let mut profile = Profile::of_step(1.0);
        let predicted = |u: f64| Predicted {
            sm_util: u / 100.0,
            sm_util_max: u / 100.0,
            std: 0.0,
            dram_util: 0.1,
            mem_mib: 1_000,
        };
        profile.predicted = utils[job.name.as_str()].map(predicted);
        job.spec.profile = ProfileIdx::from_usize(case.profiles.len());
        case.profiles.push(profile);
    }
    case
}

/// Job names, and a text for each start and move.
#[derive(Default)]
struct Starts(IdxVec<JobIdx, String>, Vec<String>);

impl Observer for Starts {
    fn job(&mut self, job: &JobLine) {
        self.0.push(job.name.clone());
    }
    fn step(&mut self, step: &StepView<'_>) {
        for action in step.actions {
            if let Action::Start(j, p) | Action::Move(j, p) = action {
                let gpus: Vec<String> = p.gpus.iter().map(|g| g.0.to_string()).collect();
                let (name, at) = (&self.0[*j], step.at.secs());
                let word = if matches!(action, Action::Move(..)) { "moves to" } else { "on" };
                self.1.push(format!("{at} {name} {word} {}", gpus.join("+")));
            }
        }
    }
}

fn starts(outcome: &Outcome) -> String {
    let mut starts = Starts::default();
    journal::read(outcome.journal.as_bytes(), &mut starts).unwrap();
    starts.1.join(", ")
}

fn placed(policy: &str, params: &str, cluster: &str, jobs: &str) -> String {
    starts(&case(policy, params, cluster, jobs).run())
}

fn demand(percent: Util, mem_mib: u32) -> Demand {
    Demand { mean: percent * 100, max: percent * 100, mem_mib, exclusive: false }
}

fn class(tasks: u8, percent: Util, mem_mib: u32) -> Class {
    Class { gpu_model: 0, tasks, util: percent * 100, mem_mib }
}

#[test]
fn costs_are_those_of_the_worked_example() {
    let cost = |tasks, percent, mem| {
        Params::default().cost(&class(tasks, percent, mem), &demand(50, 4_096), 16_384)
    };
    let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} is not {b}");
    close(cost(1, 40, 4_096), 0.65 + 0.10 + 1.0);
    close(cost(1, 70, 4_096), 0.65 + 0.32 + 1.0);
    close(cost(0, 0, 0), 0.325 + 0.5);
    let released = Params { mem_term: MemTerm::Released, ..Params::default() };
    close(released.cost(&class(1, 40, 4_096), &demand(50, 4_096), 16_384), 1.3 * 4_096.25 + 1.1);
}

#[test]
fn the_cost_is_least_at_100_percent_and_continuous() {
    for resident in [0, 30, 55, 100] {
        let cost = |max: Util| {
            let demand = Demand { max, ..demand(1, 0) };
            Params::default().cost(&class(1, resident, 0), &demand, 0)
        };
        let best = FULL_UTIL - resident * 100;
        assert!((cost(best) - 1.0).abs() < 1e-12);
        assert!((cost(best + 1) - cost(best)).abs() < 2e-4);
        for off in [1, 10, 500, 2_000] {
            assert!(cost(best + off) > cost(best));
            assert!(best < off || cost(best - off) > cost(best));
            assert!(
                best < off || cost(best + off) > cost(best - off),
                "an excess costs more than a gap"
            );
        }
    }
}

#[test]
fn resident_tasks_count_for_at_most_100_percent_if_capped() {
    let uncapped = Params { cap_resident: false, ..Params::default() };
    let (twice, once) = (class(2, 200, 0), class(2, 100, 0));
    let new_job = demand(50, 0);
    assert_eq!(
        Params::default().cost(&twice, &new_job, 0),
        Params::default().cost(&once, &new_job, 0)
    );
    assert!(uncapped.cost(&twice, &new_job, 0) > uncapped.cost(&once, &new_job, 0));
}

#[test]
fn low_utilisation_starts_first_and_gpus_fill_to_100_percent() {
    // c and d get idle GPUs, then b joins c (90 %) and a joins d (110 %).
    let jobs = "a 0 1 4 80, b 0 1 6 60, c 0 1 4 30, d 0 1 3 30";
    let mut case = case("horus", "{}", "1x2", jobs);
    case.truth = Arc::new(Undisturbed);
    let outcome = case.run();
    expect!["0 a on 1, 0 b on 0, 0 c on 0, 0 d on 1"].assert_eq(&starts(&outcome));
    expect![[r#"
        gpu0  ####bb
        gpu1  ###a
    "#]]
    .assert_eq(&outcome.chart());
}

#[test]
fn a_small_excess_costs_less_than_a_larger_gap() {
    // GPU 0 is at 40 %, GPU 1 at 55 %: 5 over costs 0.08, 10 under 0.10.
    let jobs = "a 0 1 9 40, b 0 1 9 55, e 1 1 1 50";
    expect!["0 a on 0, 0 b on 1, 1 e on 1"].assert_eq(&placed("horus", "{}", "1x2", jobs));
    let jobs = "a 0 1 9 40, b 0 1 9 55, e 1 1 1 60";
    expect!["0 a on 0, 0 b on 1, 1 e on 0"].assert_eq(&placed("horus", "{}", "1x2", jobs));
}

#[test]
fn a_job_of_high_utilisation_starves_without_credit() {
    let jobs = "a 0 1 2 95, b 0 1 1 20, c 1 1 1 20, d 2 1 1 20, e 3 1 1 20, f 4 1 1 20, g 5 1 1 20";
    let exclusive = r#"{"max_tasks": 1}"#;
    expect![[r#"
        gpu0  bcdefgaa
    "#]]
    .assert_eq(&case("horus", exclusive, "1x1", jobs).run().chart());
    expect![[r#"
        gpu0  bcaadefg
    "#]]
    .assert_eq(&case("horus-plus", exclusive, "1x1", jobs).run().chart());
}

#[test]
fn without_sharing_jobs_start_by_utilisation_in_a_window() {
    // The gang waits for both GPUs and jobs behind it start first, except with a window of 1.
    let jobs = "a 0 1 3 90, b 1 2 2 10, c 1 1 1 50, d 1 1 2 40";
    let one = |window| format!(r#"{{"max_tasks": 1, "window": {window}}}"#);
    expect![[r#"
        gpu0  aaabbc
        gpu1  .ddbb
    "#]]
    .assert_eq(&case("horus", &one(5), "1x2", jobs).run().chart());
    expect![[r#"
        gpu0  aaabbdd
        gpu1  ...bbc
    "#]]
    .assert_eq(&case("horus", &one(1), "1x2", jobs).run().chart());
}

#[test]
fn memory_and_the_number_of_tasks_are_limits() {
    let mut case = case("horus", "{}", "1x1:v100", "a 0 1 2 5, b 0 1 2 5, c 0 1 2 5, d 0 1 2 5");
    expect!["0 a on 0, 0 b on 0, 0 c on 0, 6 d on 0"].assert_eq(&starts(&case.run()));
    for job in &mut case.jobs {
        job.spec.knobs.mem_mib = 7_942;
    }
    // Two jobs would leave 500 MiB free, which is not more than the margin.
    expect!["0 a on 0, 2 b on 0, 4 c on 0, 6 d on 0"].assert_eq(&starts(&case.run()));
    for job in &mut case.jobs {
        job.spec.knobs.mem_mib = 7_941;
    }
    expect!["0 a on 0, 0 b on 0, 4 c on 0, 4 d on 0"].assert_eq(&starts(&case.run()));
}

#[test]
fn a_job_of_unknown_utilisation_shares_no_gpu() {
    let jobs = "a 0 1 4 ?, b 0 1 4 10, c 0 1 4 10";
    expect!["0 b on 0, 0 c on 0, 8 a on 0"].assert_eq(&placed("horus", "{}", "1x1", jobs));
    let jobs = "a 0 1 4 ?, b 1 1 4 10, c 1 1 4 10";
    expect!["0 a on 0, 4 b on 0, 4 c on 0"].assert_eq(&placed("horus", "{}", "1x1", jobs));
}

#[test]
fn a_gang_uses_as_few_nodes_as_possible() {
    // Node 0 has one idle GPU left, node 1 has two: the gang of two takes node 1 whole.
    let jobs = "a 0 1 9 50, g 1 2 2 50";
    expect!["0 a on 0, 1 g on 2+3"].assert_eq(&placed("horus", "{}", "2x2", jobs));
    // A gang of four takes the idle GPUs and shares one with a.
    let jobs = "a 0 1 9 50, g 1 4 2 50";
    expect!["0 a on 0, 1 g on 0+1+2+3"].assert_eq(&placed("horus", "{}", "2x2", jobs));
    // Among equal GPUs the lowest index is taken.
    let jobs = "a 0 2 9 50, b 0 2 9 50, c 0 1 9 50";
    expect!["0 a on 0+1, 0 b on 2+3, 0 c on 0"].assert_eq(&placed("horus", "{}", "2x2", jobs));
}

#[test]
fn a_cap_on_overcommitment_makes_jobs_wait() {
    let jobs = "a 0 1 2 80, b 0 1 2 60";
    expect!["0 a on 0, 0 b on 0"].assert_eq(&placed("horus", "{}", "1x1", jobs));
    expect!["0 b on 0, 2 a on 0"].assert_eq(&placed(
        "horus",
        r#"{"overcommit_cap": 130}"#,
        "1x1",
        jobs,
    ));
}

#[test]
fn the_busiest_of_three_moves_to_an_idle_gpu() {
    let jobs = "a 0 1 1 50, b 0 1 9 20, c 0 1 9 30, d 0 1 1 10, e 0 1 1 40, f 0 1 9 60";
    let plain = placed("horus", "{}", "1x2", jobs);
    expect!["0 a on 0, 0 b on 1, 0 c on 1, 0 d on 0, 0 e on 0, 0 f on 1"].assert_eq(&plain);
    expect!["0 a on 0, 0 b on 1, 0 c on 1, 0 d on 0, 0 e on 0, 0 f on 1, 3 f moves to 0"]
        .assert_eq(&placed("horus", r#"{"migrate": true}"#, "1x2", jobs));
}

#[test]
fn measurements_replace_predictions() {
    let case = case("horus", r#"{"overcommit_cap": 100}"#, "1x1", "a 0 1 9 ?, b 0 1 9 30");
    let policy = crate::policy::find("horus").unwrap().build(&case.params).unwrap();
    let mut engine = Engine::new(&case.cluster, case.costs, policy, Box::new(Undisturbed), 0);
    case.profiles.iter().for_each(|p| _ = engine.add_profile(p.clone()));
    let jobs: Vec<JobIdx> = case.jobs.iter().map(|a| engine.add_job(a.spec.clone())).collect();
    engine.step(Time::ZERO, &[Event::Submitted(jobs[0])]);
    engine.step(Time::ZERO, &[Event::Started(jobs[0])]);
    let at = Time::from_secs;
    let step = engine.step(at(1.0), &[Event::Submitted(jobs[1])]);
    assert!(step.actions.is_empty(), "no job shares a GPU with one of unknown utilisation");
    let sample = Sample { sm_util: Number32::of(0.6), mem_mib: 2_000, ..Sample::default() };
    let step = engine.step(at(2.0), &[Event::Sampled { job: jobs[0], sample }]);
    assert!(matches!(step.actions, [Action::Start(j, _)] if *j == jobs[1]));
}
