//! Pictures and laws of the policy in a world where extras add up, as it believes.

use super::*;
use crate::idx::{Idx, ProfileIdx};
use crate::interference::table::Table;
use crate::interference::{Estimate, Interference, Truth};
use crate::math::rng::Rng;
use crate::number::Number;
use crate::performance::pairs;
use crate::profile::Profile;
use crate::testing::{TestCase, picture_with};
use expect_test::expect;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A world in which a job's step is longer by `extra[own][other]` for each roommate, less or more
/// with priority and confinement, as believed.
#[derive(Clone)]
struct Additive(Vec<Vec<f64>>);

impl Truth for Additive {}

impl Interference for Additive {
    fn speed(&self, state: &State, _: u8, tenants: &[(JobIdx, Knobs)], index: usize) -> Estimate {
        let profile = |i: usize| state.spec(tenants[i].0).profile.usize();
        let others = (0..tenants.len()).filter(|i| *i != index);
        let weight = |i: usize| pairs::weight_of(tenants[index].1, tenants[i].1);
        let extra = |i: usize| self.0[profile(index)][profile(i)] * weight(i);
        Estimate::certain(1.0 / (1.0 + others.map(extra).sum::<f64>()))
    }
}

impl Additive {
    /// All pairs, as given in advance.
    fn known(&self) -> Table {
        let speed = |a: usize, b: usize| 1.0 / (1.0 + self.0[a][b]);
        let n = self.0.len();
        let all = (0..n).flat_map(|a| (a..n).map(move |b| (a, b)));
        let idx = ProfileIdx::from_usize;
        let pairs = all.map(|(a, b)| ((idx(a), idx(b)), [speed(a, b), speed(b, a)]));
        Table::new(pairs.collect::<BTreeMap<_, _>>(), 1.0)
    }
}

/// Jobs that each are a kind of work of their own, in a world of these extras.
fn case(cluster: &str, lines: &str, extra: &[&[f64]], known: bool) -> TestCase {
    let mut case = TestCase::new("roommate", cluster, lines);
    case.params = serde_json::from_str(r#"{"scan_s": 1, "min_run_s": 0}"#).expect("parameters");
    let truth = Additive(extra.iter().map(|row| row.to_vec()).collect());
    case.profiles = vec![Profile::of_step(1.0); extra.len()];
    for (i, job) in case.jobs.iter_mut().enumerate() {
        job.spec.profile = ProfileIdx::from_usize(i % extra.len());
    }
    case.known_pairs = known.then(|| truth.known());
    case.truth = Arc::new(truth);
    case
}

#[test]
fn a_pair_that_helps_shares_and_a_bad_pair_takes_turns_by_value() {
    let lines = "a 0 1 6, b 0 1 6";
    expect![[r#"
        gpu0  #######
    "#]]
    .assert_eq(&case("1x1", lines, &[&[0.0, 0.1], &[0.1, 0.0]], true).run().chart());
    expect![[r#"
        gpu0  aaaaaabbbbbb
    "#]]
    .assert_eq(&case("1x1", lines, &[&[0.0, 6.0], &[6.0, 0.0]], true).run().chart());
}

#[test]
fn a_bad_pair_that_nobody_knew_parts_once_it_was_measured() {
    let case = case("1x1", "a 0 1 9, b 0 1 9", &[&[0.0, 8.0], &[8.0, 0.0]], false);
    let outcome = case.run();
    assert!(outcome.ended && outcome.journal.contains("roommates_gain"), "{}", outcome.chart());
    let last = outcome.finished.iter().flatten().max().copied();
    assert!(last.is_some_and(|t| t <= 22), "apart for good: {}", outcome.chart());
}

#[test]
fn a_gang_loses_once_by_its_slowest_gpu() {
    // g is slowed on one GPU anyway: c joins it on the other for nothing.
    let extra: &[&[f64]] = &[&[0.0, 0.5, 0.5], &[0.0; 3], &[0.0; 3]];
    let chart = case("1x2", "g 0 2 8, b 1 1 8, c 2 1 8", extra, true).run().chart();
    assert!(chart.lines().all(|line| line.contains('#')), "{chart}");
}

#[test]
fn the_oldest_makes_room_in_a_full_room() {
    let params = r#"{"max_tasks": 1, "scan_s": 1, "min_run_s": 0, "push_ratio": 1.2, "victim": 1}"#;
    expect![[r#"
        gpu0  aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaabbaaaaaaaaaaa
    "#]]
    .assert_eq(&picture_with("roommate", params, "1x1", "a 0 1 60, b 50 1 2"));
}

#[test]
fn growth_leaves_the_reserve() {
    let mut case = case("1x8", "a 0 1 9", &[&[0.0]], true);
    case.params = serde_json::from_str(r#"{"spare": 0.25}"#).expect("parameters");
    case.jobs[0].spec.gpus_max = 8;
    let chart = case.run().chart();
    assert_eq!(chart.lines().filter(|line| line.contains('a')).count(), 6, "{chart}");
}

/// Knobs of each job when it was first placed beside another.
fn knobs_beside(case: &TestCase) -> Vec<Option<Knobs>> {
    let mut found = vec![None; case.jobs.len()];
    case.run_looking(&mut |engine| {
        let state = engine.state();
        for job in state.placed.iter().filter(|j| !state.is_alone(*j)) {
            found[job.usize()].get_or_insert(state.job(job).knobs);
        }
    });
    found
}

#[test]
fn a_promise_is_kept_by_priority_then_by_confinement_else_apart() {
    let promised = |extra: f64| {
        let mut case = case("1x1", "a 0 1 9, b 0 1 9", &[&[0.0, extra], &[0.1, 0.0]], true);
        case.jobs[0].spec.max_slowdown = Some(Number::of(1.5));
        knobs_beside(&case)
    };
    let knobs = |extra| promised(extra).iter().flatten().copied().collect::<Vec<_>>();
    let [a, b] = knobs(0.4)[..] else { panic!("they share") };
    assert!(!a.priority && b.sm_most_permille == Knobs::SM_ALL, "{a:?} {b:?}");
    let [a, b] = knobs(0.8)[..] else { panic!("they share") };
    assert!(a.priority && b.sm_most_permille == Knobs::SM_ALL, "{a:?} {b:?}");
    let [a, b] = knobs(1.2)[..] else { panic!("they share") };
    assert!(a.priority && b.sm_most_permille < Knobs::SM_ALL, "{a:?} {b:?}");
    assert!(knobs(4.0).is_empty(), "apart");
}

/// A random case in a world of random extras.
fn random_case(seed: u64, known: bool) -> TestCase {
    let mut rng = Rng::stream(seed, 211);
    let kinds = 4;
    let mut extra = || if rng.unit() < 0.2 { 4.0 * rng.unit() } else { 0.8 * rng.unit() };
    let table: Vec<Vec<f64>> = (0..kinds).map(|_| (0..kinds).map(|_| extra()).collect()).collect();
    let rows: Vec<&[f64]> = table.iter().map(Vec::as_slice).collect();
    let jobs: Vec<String> = (0..14)
        .map(|i| {
            let (at, length) = (rng.below(40), 2 + rng.below(40));
            format!("j{i} {at} {} {length}", 1 + rng.below(3))
        })
        .collect();
    case("2x3", &jobs.join(","), &rows, known)
}

#[test]
fn no_promised_job_is_above_its_bound_for_two_looks() {
    let mut above = 0;
    for seed in 0..60 {
        let mut case = random_case(seed, seed % 2 == 0);
        for job in case.jobs.iter_mut().step_by(2) {
            job.spec.max_slowdown = Some(Number::of(1.5));
        }
        let truth = case.truth.clone();
        let mut since: BTreeMap<JobIdx, Time> = BTreeMap::new();
        let outcome = case.run_looking(&mut |engine| {
            let state = engine.state();
            since.retain(|job, _| state.job(*job).is_placed());
            for job in state.placed.iter() {
                let most = state.spec(job).max_slowdown;
                let gpus = &state.job(job).gpus;
                let speed = |gpu: &GpuIdx| {
                    let on = state.gpu(*gpu);
                    let tenants: Vec<(JobIdx, Knobs)> =
                        on.tenants.iter().map(|t| (*t, state.job(*t).knobs)).collect();
                    let index = tenants.iter().position(|t| t.0 == job).expect("it is there");
                    truth.speed(state, on.gpu_model, &tenants, index).mean
                };
                let slowest = gpus.iter().map(speed).fold(1.0, f64::min);
                if most.is_some_and(|most| slowest * most.get() < 0.99) {
                    above += 1;
                    let first = *since.entry(job).or_insert(state.now);
                    let for_s = (state.now - first).secs();
                    assert!(for_s <= 3.0, "seed {seed}: job {job} {slowest} for {for_s} s");
                } else {
                    since.remove(&job);
                }
            }
        });
        assert!(outcome.ended, "seed {seed}: a suspended job comes back");
    }
    assert!(above > 0, "unknown pairs break a promise for a moment, or nothing was tried");
}

/// The policy, and a check that no decision lowers the value of what runs.
struct Watched<P>(P);

impl Policy for Watched<Roommate> {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        self.0.believed.refresh(plan);
        let speed = |own: &Roommate, plan: &Plan<'_>, job| own.believed.speed(plan, job);
        let before: Vec<(JobIdx, f64)> =
            plan.placed.iter().map(|job| (job, speed(&self.0, plan, job))).collect();
        self.0.schedule(plan);
        let value = |job| self.0.value(plan, job);
        let was: f64 = before.iter().map(|(job, speed)| value(*job) * speed).sum();
        let is: f64 = plan.placed.iter().map(|j| value(j) * speed(&self.0, plan, j)).sum();
        assert!(is >= was * (1.0 - 1e-9), "at {} the value falls from {was} to {is}", plan.now);
    }
}

#[test]
fn no_decision_lowers_the_value_at_known_speeds() {
    for seed in 0..60 {
        let case = random_case(seed, true);
        let params = serde_json::from_value(serde_json::json!({"scan_s": 1, "min_run_s": 0}));
        let policy = Roommate::new(params.expect("parameters"));
        assert!(case.run_policy(Box::new(Watched(policy)), &mut |_| {}).ended, "seed {seed}");
    }
}

#[test]
fn the_table_is_exact_once_all_pairs_have_met() {
    let extra: &[&[f64]] = &[&[0.1, 0.3], &[0.5, 0.2]];
    let case = case("1x1", "a 0 1 40, b 0 1 40", extra, false);
    let mut learned = None;
    case.run_looking(&mut |engine| {
        let [a, b] = [0, 1].map(ProfileIdx);
        let pairs = &engine.state().pairs;
        learned = pairs.measured(0, a, b).zip(pairs.measured(0, b, a)).or(learned);
    });
    let (of_a, of_b) = learned.expect("they have met");
    assert!((of_a.mean - 0.3).abs() < 1e-6 && (of_b.mean - 0.5).abs() < 1e-6, "{of_a:?} {of_b:?}");
}

#[test]
fn fairness_gives_the_team_that_has_less_the_next_gpu() {
    let first = |fairness: f64| {
        let mut case = case("1x2", "a 0 1 9, b 0 1 9, c 1 1 2, d 1 1 2", &[&[9.0]], true);
        let params = serde_json::json!({"fairness": fairness, "push": false, "patience": 0.0});
        case.params = serde_json::from_value(params).expect("parameters");
        case.jobs[3].spec.team = TeamIdx(1);
        let finished = case.run().finished;
        (finished[2], finished[3])
    };
    let (c, d) = first(0.0);
    assert!(c <= d, "in order of arrival: {c:?} {d:?}");
    let (c, d) = first(1.0);
    assert!(d <= c, "the other team first: {c:?} {d:?}");
}
