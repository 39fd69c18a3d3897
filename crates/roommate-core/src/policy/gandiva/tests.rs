//! Charts of Gandiva (time slicing, packing, migration, elastic scaling) and properties of random
//! cases.

use crate::engine::Engine;
use crate::event::{Action, Event, Sample};
use crate::idx::{GpuIdx, Idx, IdxVec, JobIdx, ProfileIdx};
use crate::interference::{Estimate, Interference, Truth};
use crate::job::Phase;
use crate::journal::{self, JobLine, Observer, StepView};
use crate::knobs::Knobs;
use crate::math::rng::Rng;
use crate::number::{Number, Number32, Positive};
use crate::profile::Profile;
use crate::state::State;
use crate::testing::TestCase;
use crate::time::{Span, Time};
use expect_test::expect;
use std::collections::BTreeMap;
use std::sync::Arc;

/// True interference: the speed of a profile packed with another one, for each pair.
#[derive(Debug, Default)]
struct Pairs {
    speed: Vec<(u32, u32, f64)>,
    /// From when on packed jobs run at a fifth of that speed.
    worse_from_s: Option<f64>,
}

fn pairs(speed: &[(u32, u32, f64)]) -> Arc<Pairs> {
    Arc::new(Pairs { speed: speed.to_vec(), worse_from_s: None })
}

impl Truth for Pairs {}

impl Interference for Pairs {
    fn speed(&self, state: &State, _: u8, tenants: &[(JobIdx, Knobs)], who: usize) -> Estimate {
        let profile = |i: usize| state.spec(tenants[i].0).profile.0;
        let beside = |i: usize| {
            let known = self.speed.iter().find(|(a, b, _)| (*a, *b) == (profile(who), profile(i)));
            known.map_or(0.5, |(_, _, speed)| *speed)
        };
        let others = (0..tenants.len()).filter(|i| *i != who);
        let worse = tenants.len() > 1 && self.worse_from_s.is_some_and(|s| state.now.secs() >= s);
        let factor = if worse { 0.2 } else { 1.0 };
        Estimate::certain(factor * others.map(beside).product::<f64>())
    }
}

/// A case without switching costs, in which every job has its own profile with steps of 0.1 s.
fn case(params: &str, cluster: &str, jobs: &str) -> TestCase {
    let mut case = TestCase::new("gandiva", cluster, jobs);
    case.params = serde_json::from_str(params).unwrap();
    case.costs.resume = Span::ZERO;
    case.profiles = vec![Profile::of_step(0.1); case.jobs.len()];
    for (i, job) in case.jobs.iter_mut().enumerate() {
        job.spec.profile = ProfileIdx::from_usize(i);
        job.work *= 10.0;
        job.spec.work = Some(Number::of(job.work));
    }
    case
}

const SLICES: &str = r#"{"slice_s": 1, "scan_s": 1, "pack": false}"#;

#[test]
fn time_slices_rotate_one_job_at_a_time() {
    let out = case(SLICES, "1x2", "a 0 1 4, b 0 1 4, c 0 1 4").run();
    expect![[r"
        gpu0  aabbcc
        gpu1  bccaab
    "]]
    .assert_eq(&out.chart());
    assert_eq!(out.finished, [Some(5), Some(6), Some(6)]);
}

#[test]
fn an_arriving_job_gets_the_next_slice() {
    let params = r#"{"slice_s": 3, "scan_s": 3, "pack": false}"#;
    expect![[r#"
        gpu0  aaabbbaaacccbbaa
    "#]]
    .assert_eq(&case(params, "1x1", "a 0 1 8, b 0 1 5, c 4 1 3").run().chart());
}

#[test]
fn a_gang_gets_its_time_slice() {
    expect![[r#"
        gpu0  abababaaa
        gpu1  cbcbcbccc
    "#]]
    .assert_eq(&case(SLICES, "1x2", "a 0 1 6, b 0 2 3, c 0 1 6").run().chart());
}

#[test]
fn the_gpus_of_a_finished_job_are_reused_at_once() {
    let params = r#"{"slice_s": 4, "scan_s": 4, "pack": false}"#;
    expect![[r#"
        gpu0  aaccdddc
        gpu1  bbbbbbb
    "#]]
    .assert_eq(&case(params, "1x2", "a 0 1 2, b 0 1 7, c 0 1 3, d 0 1 3").run().chart());
}

#[test]
fn a_start_longer_than_a_slice_still_makes_progress() {
    let mut case = case(SLICES, "1x1", "a 0 1 4, b 0 1 4");
    case.costs.resume = Span::from_secs(2.0);
    expect![[r#"
        gpu0  abaaaabbbbaaabbb
    "#]]
    .assert_eq(&case.run().chart());
}

#[test]
fn suspended_jobs_hold_no_memory() {
    let mut case = case(SLICES, "1x1:v100", "a 0 1 2, b 0 1 2, c 0 1 2");
    for job in &mut case.jobs {
        job.spec.knobs.mem_mib = 14_000;
    }
    let mut suspended = 0;
    let out = case.run_looking(&mut |engine| {
        let state = engine.state();
        for job in state.jobs.iter().filter(|j| !j.parked_on.is_empty()) {
            suspended += u32::from(job.phase == Phase::Pending && job.gpus.is_empty());
        }
        let held = u32::from(!state.gpus[GpuIdx(0)].tenants.is_empty()) * 14_000;
        assert_eq!(state.gpus[GpuIdx(0)].mem_used_mib, held);
    });
    expect![[r#"
        gpu0  abcabc
    "#]]
    .assert_eq(&out.chart());
    assert!(suspended > 0, "no job was suspended to host memory");
}

const PACKS: &str = r#"{"slice_s": 4, "scan_s": 4, "trial_s": 2, "cool_s": 0}"#;
/// a and b gain from packing; a and c do not.
const A_B: &[(u32, u32, f64)] = &[(0, 1, 0.9), (1, 0, 0.9), (0, 2, 0.5), (2, 0, 0.4)];

/// Runs a case in which counters report these utilisations of the jobs once they run.
fn run_counted(case: &TestCase, utils: &[f32]) -> String {
    let mut sampled = vec![false; utils.len()];
    let out = case.run_looking(&mut |engine: &mut Engine| {
        for (i, sampled) in sampled.iter_mut().enumerate() {
            let job = JobIdx::from_usize(i);
            let runs = engine.state().jobs.get(job).is_some_and(|j| j.phase == Phase::Running);
            if runs && !*sampled {
                *sampled = true;
                let sample = Sample { sm_util: Number32::of(utils[i]), ..Sample::default() };
                let now = engine.state().now;
                assert!(!engine.step(now, &[Event::Sampled { job, sample }]).asked);
            }
        }
    });
    out.chart()
}

#[test]
fn a_pack_that_helps_is_kept_and_rotates_as_one() {
    let mut case = case(PACKS, "1x1", "a 0 1 20, b 0 1 20, c 0 1 20");
    case.truth = pairs(A_B);
    // c exceeds the cap with any other job and is never tried.
    expect![[r#"
        gpu0  aaaabbbbcccc####cccc####cccc####cccc####cccc##
    "#]]
    .assert_eq(&run_counted(&case, &[0.4, 0.4, 0.9]));
}

#[test]
fn a_pack_that_does_not_help_is_undone_and_remembered() {
    let mut case = case(PACKS, "1x1", "a 0 1 14, c 0 1 14");
    case.truth = pairs(&[(0, 1, 0.5), (1, 0, 0.4)]);
    case.params.insert("pack_util_cap".into(), 1.5.into());
    expect![[r#"
        gpu0  aaaabbbb###abbbbaaaabbbbaaaab
    "#]]
    .assert_eq(&run_counted(&case, &[0.4, 0.9]));
    case.params.insert("refuse_s".into(), 8.into());
    // The refusal expires after two slices.
    expect![[r#"
        gpu0  aaaabbbb###abbbbaaaa###baabbb
    "#]]
    .assert_eq(&run_counted(&case, &[0.4, 0.9]));
}

/// Jobs on each GPU in the last second of every slice, until the first job ends.
fn before_each_slice_ends(case: &TestCase) -> Vec<Vec<Vec<JobIdx>>> {
    let mut seen: BTreeMap<Time, Vec<Vec<JobIdx>>> = BTreeMap::new();
    let mut end = None;
    case.run_looking(&mut |engine| {
        let state = engine.state();
        if state.jobs.iter().any(|j| j.phase == Phase::Done) {
            end.get_or_insert(state.now);
        }
        seen.insert(state.now, state.gpus.iter().map(|g| g.tenants.to_vec()).collect());
    });
    let slice = Span::from_secs(case.params["slice_s"].as_f64().unwrap());
    let slices = end.unwrap().0 / slice.0;
    // Nothing changes between two calls.
    let at = |n: u64| seen.range(..Time(n * slice.0)).next_back().unwrap().1.clone();
    (1..=slices).map(at).collect()
}

#[test]
fn a_refused_trial_does_not_change_the_slices() {
    for cluster in ["1x1", "1x2", "1x3"] {
        let jobs = "a 0 1 70, b 0 1 70, c 0 1 70, d 0 1 70, e 0 1 70";
        let mut case = case(PACKS, cluster, jobs);
        let kinds = (0..5).flat_map(|a| (0..5).map(move |b| (a, b, 0.45)));
        case.truth = Arc::new(Pairs { speed: kinds.collect(), worse_from_s: None });
        let tried = case.run();
        let trials = tried.journal.matches("not_worth_sharing").count();
        assert!(trials >= 4, "{trials} {}", tried.chart());
        let with = before_each_slice_ends(&case);
        case.params.insert("pack".into(), false.into());
        let without = before_each_slice_ends(&case);
        let common = with.len().min(without.len());
        assert!(common > 15 && with[..common] == without[..common], "{}", tried.chart());
    }
}

#[test]
fn no_job_is_packed_while_gpus_are_idle() {
    let mut case = case(PACKS, "1x2", "a 0 1 9, b 0 1 9");
    case.truth = pairs(&[(0, 1, 1.0), (1, 0, 1.0)]);
    expect![[r#"
        gpu0  aaaaaaaaa
        gpu1  bbbbbbbbb
    "#]]
    .assert_eq(&case.run().chart());
}

#[test]
fn a_pack_is_split_when_gpus_are_idle() {
    let mut case = case(PACKS, "1x2", "a 0 1 20, b 0 1 20, c 0 1 9");
    case.truth =
        pairs(&[(0, 1, 0.8), (1, 0, 0.8), (0, 2, 0.8), (2, 0, 0.8), (1, 2, 0.8), (2, 1, 0.8)]);
    expect![[r#"
        gpu0  aaaaaaaa#####aaaaaaaa
        gpu1  bbbbcccccccccbbbbbbbbbbbb
    "#]]
    .assert_eq(&case.run().chart());
}

#[test]
fn a_pack_that_becomes_slow_is_split() {
    let mut case = case(PACKS, "1x1", "a 0 1 20, b 0 1 20");
    let speed = vec![(0, 1, 0.9), (1, 0, 0.9)];
    case.truth = Arc::new(Pairs { speed, worse_from_s: Some(17.0) });
    expect![[r#"
        gpu0  aaaabbbb################aaaabbbbaaabbb
    "#]]
    .assert_eq(&case.run().chart());
}

#[test]
fn memory_peaks_of_a_pack_must_fit() {
    let mut case = case(PACKS, "1x1:v100", "a 0 1 12, b 0 1 12");
    case.truth = pairs(&[(0, 1, 0.9), (1, 0, 0.9)]);
    let mut with = |mem_mib: u32| {
        case.jobs.iter_mut().for_each(|a| a.spec.knobs.mem_mib = mem_mib);
        case.run().chart()
    };
    // The memory is 16 GiB, of which a tenth stays free.
    expect![[r#"
        gpu0  aaaabbbb#########
    "#]]
    .assert_eq(&with(7_000));
    expect![[r#"
        gpu0  aaaabbbbaaaabbbbaaaabbbb
    "#]]
    .assert_eq(&with(7_500));
}

#[test]
fn idle_gpus_of_other_classes_come_before_time_slicing() {
    expect![[r#"
        gpu0  aaaaa
        gpu1  aaaaa
        gpu2  .bbb
    "#]]
    .assert_eq(&case(SLICES, "1x3", "a 0 2 5, b 1 1 3").run().chart());
}

#[test]
fn a_suspended_job_migrates_to_an_idle_gpu() {
    expect![[r#"
        gpu0  acaccccc
        gpu1  bbbaaaa
    "#]]
    .assert_eq(&case(SLICES, "2x1", "a 0 1 6, b 0 1 3, c 0 1 6").run().chart());
    // The jobs are too young for a migration of ten seconds to pay.
    let mut dear = case(SLICES, "2x1", "a 0 1 6, b 0 1 3, c 0 1 6");
    dear.costs.migrate = Some(Span::from_secs(10.0));
    expect![[r#"
        gpu0  acacacacacac
        gpu1  bbb
    "#]]
    .assert_eq(&dear.run().chart());
}

#[test]
fn a_node_with_few_jobs_is_emptied_for_a_wide_job() {
    let params = r#"{"slice_s": 1, "scan_s": 1, "defrag_stop": 0.5, "migrate_gain": 0.5}"#;
    let mut case = case(params, "2x2", "a 0 1 10, b 0 1 3, d 0 1 8, c 4 2 4");
    case.costs.migrate = Some(Span::from_secs(1.0));
    let out = case.run();
    expect![[r#"
        gpu0  aaaaaaaaaa
        gpu1  bbbcccccc
        gpu2  ccc.dddd
        gpu3  ....dddd
    "#]]
    .assert_eq(&out.chart());
    assert_eq!(out.finished, [Some(10), Some(3), Some(9), Some(8)]);
}

#[test]
fn a_spread_gang_is_consolidated_if_that_is_faster() {
    let gang = |spread_speed: f64| {
        let mut case = case(SLICES, "2x2", "a 0 1 12, b 0 1 2, d 0 1 5, c 2 2 8");
        case.profiles[3].spread_speed = Positive::of(spread_speed);
        case.run().chart()
    };
    expect![[r#"
        gpu0  aaaaaaaaaaaa
        gpu1  bbddd
        gpu2  cccccddddddd
        gpu3  ..dddddddddd
    "#]]
    .assert_eq(&gang(0.5));
    expect![[r#"
        gpu0  aaaaaaaaaaaa
        gpu1  bbdddddddd
        gpu2  ccccc
        gpu3  ..dddddddd
    "#]]
    .assert_eq(&gang(1.0));
}

#[test]
fn nodes_go_to_the_class_furthest_below_its_share() {
    // Wide jobs request six of nine GPUs, so they get one of two nodes.
    let jobs = "a 0 1 9, b 0 1 9, c 0 1 9, d 1 2 4, e 1 2 4, f 1 2 4";
    let mut case = case("{}", "2x2", jobs);
    case.policy = "gandiva-tiresias-style".into();
    case.params = serde_json::from_str(r#"{"slice_s": 1, "scan_s": 60, "balance_s": 3}"#).unwrap();
    expect![[r#"
        gpu0  aaedddfffbbbbb
        gpu1  bbedddfffcccc
        gpu2  ccdfcceaaeaeaaa
        gpu3  ..dfabebce.e
    "#]]
    .assert_eq(&case.run().chart());
}

const GROWS: &str = r#"{"slice_s": 1, "scan_s": 1, "pack": false, "trial_s": 1, "grow_idle_s": 3}"#;

/// The case with the first job elastic up to `gpus_max` GPUs, speed = GPUs ^ `scaling`.
fn elastic(params: &str, cluster: &str, jobs: &str, gpus_max: u16, scaling: f64) -> TestCase {
    let mut case = case(params, cluster, jobs);
    case.jobs[0].spec.gpus_max = gpus_max;
    case.profiles[0].scaling = Some(scaling);
    case
}

#[test]
fn a_job_grows_into_idle_gpus_and_shrinks_for_an_arrival() {
    let mut case = elastic(GROWS, "1x2", "e 0 1 15, f 8 1 3", 2, 0.9);
    let out = case.run();
    expect![[r#"
        gpu0  aaaaaaaaaaa
        gpu1  ...aaaaabbb
    "#]]
    .assert_eq(&out.chart());
    // Three seconds with one GPU, five with two, the rest with one.
    let ends = 8.0 + 15.0 - 3.0 - 5.0 * 2_f64.powf(0.9);
    assert_eq!(out.finished, [Some(ends.ceil() as u64), Some(11)]);
    assert!(out.journal.contains(r#""grows":2"#) && out.journal.contains(r#""shrinks_for":1"#));
    assert_eq!(out.metrics().moves, 2);
    // A shrink that costs a second does not delay the arriving job.
    case.costs.migrate = Some(Span::from_secs(1.0));
    let dear = case.run();
    expect![[r#"
        gpu0  aaaaaaaaaaaaaaaa
        gpu1  ....aaaabbb...aa
    "#]]
    .assert_eq(&dear.chart());
    assert_eq!(dear.finished[1], Some(11));
}

#[test]
fn a_job_grows_only_when_it_is_old_enough_to_pay() {
    // With two GPUs it is at least 1.4 times as fast, so 2 s pay after 2 / (1 − 1/1.4) = 7 s.
    let mut case = elastic(GROWS, "1x2", "e 0 1 20", 2, 1.0);
    case.costs.migrate = Some(Span::from_secs(2.0));
    expect![[r#"
        gpu0  aaaaaaaaaaaaaaaa
        gpu1  .......aaaaaaaaa
    "#]]
    .assert_eq(&case.run().chart());
}

#[test]
fn a_growth_that_does_not_pay_is_undone_and_remembered() {
    let mut case = elastic(GROWS, "1x2", "e 0 1 12", 2, 0.3);
    let out = case.run();
    expect![[r#"
        gpu0  aaaaaaaaaaaa
        gpu1  ...a
    "#]]
    .assert_eq(&out.chart());
    assert!(out.journal.contains(r#""not_worth_growing":1"#));
    // The refusal expires after `refuse_s`.
    case.params.insert("refuse_s".into(), 4.into());
    expect![[r#"
        gpu0  aaaaaaaaaaaa
        gpu1  ...a....a
    "#]]
    .assert_eq(&case.run().chart());
}

#[test]
fn jobs_grow_by_powers_of_two_and_the_latest_shrinks_first() {
    let mut case = elastic(GROWS, "1x8", "e 0 1 60, g 0 2 60, f 12 1 4, h 14 2 3", 4, 1.0);
    case.jobs[1].spec.gpus_max = 4;
    expect![[r#"
        gpu0  aaaaaaaaaaaaaaaaaaaaaa
        gpu1  bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb
        gpu2  bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb
        gpu3  ...aaaaaaaaaaaaaaaaaaa
        gpu4  ...bbbbbbbbbbbddd..aaa
        gpu5  ...bbbbbbbbbbbddd..aaa
        gpu6  ....aaaaaaaacccc...bbbbbbbbbbbbbbbbb
        gpu7  ....aaaaaaaa.......bbbbbbbbbbbbbbbbb
    "#]]
    .assert_eq(&case.run().chart());
}

#[test]
fn only_elastic_jobs_grow_and_only_if_enabled() {
    let mut case = elastic(GROWS, "1x4", "e 0 1 9, f 0 1 9", 4, 1.0);
    expect![[r#"
        gpu0  aaaaaa
        gpu1  bbbbbbbbb
        gpu2  ...aaa
        gpu3
    "#]]
    .assert_eq(&case.run().chart());
    case.params.insert("grow".into(), false.into());
    expect![[r#"
        gpu0  aaaaaaaaa
        gpu1  bbbbbbbbb
        gpu2
        gpu3
    "#]]
    .assert_eq(&case.run().chart());
}

#[test]
fn no_job_grows_on_an_oversubscribed_node() {
    // Two wide jobs cannot run at once, even if e shrinks.
    let jobs = "e 0 1 40, f 8 2 6, g 9 2 6, h 10 1 3";
    expect![[r#"
        gpu0  aaaaaaaaaaabcbcbcbcc...aaaaaaaa
        gpu1  ...aaaaabbcbcbcbcbcc
        gpu2  ........bbcdadadaaaaaaaaaaaaaaa
    "#]]
    .assert_eq(&elastic(GROWS, "1x3", jobs, 2, 1.0).run().chart());
}

#[test]
fn jobs_on_several_nodes_shrink_for_a_spanning_gang() {
    let mut case = elastic(GROWS, "2x2", "e 0 1 30, d 0 2 4, g 4 1 30, f 14 2 5", 2, 1.0);
    case.jobs[2].spec.gpus_max = 2;
    expect![[r#"
        gpu0  aaaaaaaaaaaaaaaaaaa
        gpu1  ...aaaaaaaaaaaddddd
        gpu2  bbbbcccccccccccccccccccccc
        gpu3  bbbb...cccccccddddd...cccc
    "#]]
    .assert_eq(&case.run().chart());
}

/// Random jobs of 1 to `widest` GPUs on one node, without switching costs.
fn random_turns(seed: u64, widest: u64) -> TestCase {
    let mut rng = Rng::stream(seed, 1);
    let gpus = 1 + rng.below(4);
    let jobs: Vec<String> = (0..2 + rng.below(7))
        .map(|i| {
            let width = 1 + rng.below(widest.min(gpus));
            format!("j{i} {} {width} {}", rng.below(6), 2 + rng.below(12))
        })
        .collect();
    let mut case = case(SLICES, &format!("1x{gpus}"), &jobs.join(","));
    case.params.insert("max_height".into(), 99.into());
    case
}

#[test]
fn every_job_runs_once_in_as_many_slices_as_jobs() {
    for seed in 0..300 {
        let case = random_turns(seed, 4);
        // For each job: slices waited, and the most jobs at any time meanwhile.
        let mut waits = vec![(0, 0); case.jobs.len()];
        let mut last = None;
        case.run_looking(&mut |engine| {
            let state = engine.state();
            if last == Some(state.now) {
                return;
            }
            last = Some(state.now);
            let alive = state.pending.len() + state.placed.len();
            for (i, job) in state.jobs.iter().enumerate() {
                let (slices, most) = waits[i];
                let waits_on = job.phase == Phase::Pending;
                waits[i] = if waits_on { (slices + 1, alive.max(most)) } else { (0, 0) };
                assert!(
                    waits[i].0 <= waits[i].1,
                    "seed {seed} at {}: {}",
                    state.now,
                    case.run().chart()
                );
            }
        });
    }
}

#[test]
fn no_gpu_is_idle_while_a_job_waits() {
    for seed in 0..300 {
        let case = random_turns(seed, 1);
        let mut now = Time::ZERO;
        case.run_looking(&mut |engine| {
            let state = engine.state();
            now = state.now;
            let busy = state.idle_gpus() == 0 || state.pending.is_empty();
            assert!(busy, "seed {seed} at {now}: {}", case.run().chart());
        });
        assert!(now > Time::ZERO);
    }
}

#[test]
fn with_gpus_for_all_no_job_is_suspended_or_packed() {
    for seed in 0..200 {
        let mut case = random_turns(seed, 1);
        let jobs = case.jobs.len();
        case.cluster = format!("{}x2", jobs.div_ceil(2)).parse().unwrap();
        case.params.insert("pack".into(), true.into());
        let out = case.run();
        assert!(!out.journal.contains("suspend"), "seed {seed}: {}", out.chart());
        assert!(!out.chart().contains('#'), "seed {seed}: {}", out.chart());
        let ends = case.jobs.iter().map(|a| a.submit + (a.work / 10.0) as u64);
        assert!(out.finished.iter().flatten().copied().eq(ends), "seed {seed}");
    }
}

#[test]
fn no_job_is_grown_while_another_waits() {
    let mut grown = 0;
    for seed in 0..300 {
        let mut case = random_turns(seed, 2);
        let elastic = case.jobs.iter_mut().filter(|a| a.submit % 2 == 0);
        elastic.for_each(|a| a.spec.gpus_max = 4);
        case.params.insert("trial_s".into(), 1.into());
        case.params.insert("grow_idle_s".into(), 1.into());
        let out = case.run_looking(&mut |engine| {
            let state = engine.state();
            let grown = |j: &JobIdx| state.job(*j).gpus.len() > usize::from(state.spec(*j).gpus);
            let all_fine = state.pending.is_empty() || !state.placed.iter().any(|j| grown(&j));
            assert!(all_fine, "seed {seed} at {}: {}", state.now, case.run().chart());
        });
        assert!(out.ended);
        grown += usize::from(out.journal.contains("\"grows\""));
    }
    assert!(grown > 50, "only {grown} states with a grown job");
}

/// Tracks the GPUs of each job and checks every move.
#[derive(Default)]
struct Moves {
    gpus: IdxVec<JobIdx, Vec<GpuIdx>>,
    moved: IdxVec<JobIdx, Option<Time>>,
    count: usize,
    size: u32,
    cool: Span,
}

impl Moves {
    fn nodes(&self) -> usize {
        let mut nodes: Vec<u32> = self.gpus.iter().flatten().map(|g| g.0 / self.size).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes.len()
    }
}

impl Observer for Moves {
    fn job(&mut self, _: &JobLine) {
        self.gpus.push(Vec::new());
        self.moved.push(None);
    }
    fn step(&mut self, step: &StepView<'_>) {
        for fact in step.facts {
            if let Event::Finished(job) = fact {
                self.gpus[*job].clear();
            }
        }
        for action in step.actions {
            let job = action.job();
            let before = self.nodes();
            match action {
                Action::Stop(_) | Action::Suspend(_) => self.gpus[job].clear(),
                Action::Start(_, p) => self.gpus[job] = p.gpus.to_vec(),
                Action::Move(_, p) => {
                    self.gpus[job] = p.gpus.to_vec();
                    assert!(self.nodes() <= before, "a move uses one more node");
                    let cool = self.moved[job].is_none_or(|at| step.at - at >= self.cool);
                    assert!(cool, "job {job} moves back within the pause");
                    self.moved[job] = Some(step.at);
                    self.count += 1;
                }
                _ => {}
            }
        }
    }
}

#[test]
fn moves_use_no_more_nodes_and_do_not_oscillate() {
    let mut count = 0;
    for seed in 0..300 {
        let mut case = random_turns(seed, 1);
        case.cluster = format!("{}x4", 2 + seed % 3).parse().unwrap();
        case.params = serde_json::from_str(
            r#"{"slice_s": 2, "scan_s": 2, "pack": false, "defrag_stop": 0.25, "cool_s": 5}"#,
        )
        .unwrap();
        let mut moves = Moves { size: 4, cool: Span::from_secs(5.0), ..Moves::default() };
        journal::read(case.run().journal.as_bytes(), &mut moves).unwrap();
        count += moves.count;
    }
    assert!(count > 50, "only {count} moves");
}
