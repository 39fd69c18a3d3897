//! Gandiva in pictures: turns, packs by trial, migrations, elastic; and what must hold of it in any case.

use crate::engine::Engine;
use crate::event::{Action, Event, Sample};
use crate::idx::{GpuIdx, Idx, JobIdx, ProfileIdx};
use crate::interference::{Estimate, Interference};
use crate::job::Phase;
use crate::journal::{self, JobLine, Observer, StepView};
use crate::knobs::Knobs;
use crate::math::rng::Rng;
use crate::profile::Profile;
use crate::state::State;
use crate::testing::TestCase;
use crate::time::{Span, Time};
use expect_test::expect;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What is true of roommates: the speed of each profile beside each other kind.
#[derive(Debug, Default)]
struct Pairs {
    speed: Vec<(u32, u32, f64)>,
    /// From when on everybody who shares runs at a fifth of that.
    worse_from_s: Option<f64>,
}

fn pairs(speed: &[(u32, u32, f64)]) -> Arc<Pairs> {
    Arc::new(Pairs { speed: speed.to_vec(), worse_from_s: None })
}

impl Interference for Pairs {
    fn speed(&self, state: &State, _: u8, tenants: &[(JobIdx, Knobs)], who: usize) -> Estimate {
        let kind = |i: usize| state.spec(tenants[i].0).profile.0;
        let beside = |i: usize| {
            let known = self.speed.iter().find(|(a, b, _)| (*a, *b) == (kind(who), kind(i)));
            known.map_or(0.5, |(_, _, speed)| *speed)
        };
        let others = (0..tenants.len()).filter(|i| *i != who);
        let worse = tenants.len() > 1 && self.worse_from_s.is_some_and(|s| state.now.secs() >= s);
        let factor = if worse { 0.2 } else { 1.0 };
        Estimate::certain(factor * others.map(beside).product::<f64>())
    }
}

/// Free changes; every job has its own profile, with steps of a tenth of a second.
fn case(params: &str, cluster: &str, jobs: &str) -> TestCase {
    let mut case = TestCase::new("gandiva", cluster, jobs);
    case.params = serde_json::from_str(params).unwrap();
    case.costs.resume = Span::ZERO;
    case.profiles = vec![Profile::of_step(0.1); case.jobs.len()];
    for (i, job) in case.jobs.iter_mut().enumerate() {
        job.spec.profile = ProfileIdx::from_usize(i);
        job.work *= 10.0;
        job.spec.work = Some(job.work);
    }
    case
}

const TURNS: &str = r#"{"slice_s": 1, "scan_s": 1, "pack": false}"#;

#[test]
fn jobs_take_turns_and_only_one_is_switched_at_a_time() {
    let out = case(TURNS, "1x2", "a 0 1 4, b 0 1 4, c 0 1 4").run();
    expect![[r"
        gpu0  aabbcc
        gpu1  bccaab
    "]]
    .assert_eq(&out.chart());
    assert_eq!(out.finished, [Some(5), Some(6), Some(6)]);
}

#[test]
fn a_newcomer_is_next() {
    let params = r#"{"slice_s": 3, "scan_s": 3, "pack": false}"#;
    expect![[r#"
        gpu0  aaabbbaaacccbbaa
    "#]]
    .assert_eq(&case(params, "1x1", "a 0 1 8, b 0 1 5, c 4 1 3").run().chart());
}

#[test]
fn a_gang_is_not_skipped_for_ever() {
    expect![[r#"
        gpu0  abababaaa
        gpu1  cbcbcbccc
    "#]]
    .assert_eq(&case(TURNS, "1x2", "a 0 1 6, b 0 2 3, c 0 1 6").run().chart());
}

#[test]
fn who_leaves_makes_room_at_once() {
    let params = r#"{"slice_s": 4, "scan_s": 4, "pack": false}"#;
    expect![[r#"
        gpu0  aaccdddc
        gpu1  bbbbbbb
    "#]]
    .assert_eq(&case(params, "1x2", "a 0 1 2, b 0 1 7, c 0 1 3, d 0 1 3").run().chart());
}

#[test]
fn a_start_that_takes_longer_than_a_slice_still_gets_something_done() {
    let mut case = case(TURNS, "1x1", "a 0 1 4, b 0 1 4");
    case.costs.resume = Span::from_secs(2.0);
    expect![[r#"
        gpu0  abaaaabbbbaaabbb
    "#]]
    .assert_eq(&case.run().chart());
}

#[test]
fn suspended_jobs_hold_no_memory() {
    let mut case = case(TURNS, "1x1:v100", "a 0 1 2, b 0 1 2, c 0 1 2");
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
    assert!(suspended > 0, "somebody waited in host memory");
}

const PACKS: &str = r#"{"slice_s": 4, "scan_s": 4, "trial_s": 2, "cool_s": 0}"#;
/// a and b go well together; a and c do not.
const A_B: &[(u32, u32, f64)] = &[(0, 1, 0.9), (1, 0, 0.9), (0, 2, 0.5), (2, 0, 0.4)];

/// Plays a case in which counters show these utilisations of the jobs once they run.
fn run_counted(case: &TestCase, utils: &[f32]) -> String {
    let mut told = vec![false; utils.len()];
    let out = case.run_looking(&mut |engine: &mut Engine| {
        for (i, told) in told.iter_mut().enumerate() {
            let job = JobIdx::from_usize(i);
            let runs = engine.state().jobs.get(job).is_some_and(|j| j.phase == Phase::Running);
            if runs && !*told {
                *told = true;
                let sample = Sample { sm_util: utils[i], ..Sample::default() };
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
    // c with anything exceeds the cap and is never tried.
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
    // The refusal is forgotten after two slices.
    expect![[r#"
        gpu0  aaaabbbb###abbbbaaaa###baabbb
    "#]]
    .assert_eq(&run_counted(&case, &[0.4, 0.9]));
}

/// Who is on each GPU in the last second of every slice, until the first job ends.
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
    // Nothing changes between two looks.
    let at = |n: u64| seen.range(..Time(n * slice.0)).next_back().unwrap().1.clone();
    (1..=slices).map(at).collect()
}

#[test]
fn a_refused_trial_leaves_everything_as_it_was() {
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
fn nobody_shares_while_there_is_room() {
    let mut case = case(PACKS, "1x2", "a 0 1 9, b 0 1 9");
    case.truth = pairs(&[(0, 1, 1.0), (1, 0, 1.0)]);
    expect![[r#"
        gpu0  aaaaaaaaa
        gpu1  bbbbbbbbb
    "#]]
    .assert_eq(&case.run().chart());
}

#[test]
fn a_pack_parts_when_there_is_room_again() {
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
fn a_pack_that_turns_bad_is_undone() {
    let mut case = case(PACKS, "1x1", "a 0 1 20, b 0 1 20");
    let speed = vec![(0, 1, 0.9), (1, 0, 0.9)];
    case.truth = Arc::new(Pairs { speed, worse_from_s: Some(17.0) });
    expect![[r#"
        gpu0  aaaabbbb################aaaabbbbaaabbb
    "#]]
    .assert_eq(&case.run().chart());
}

#[test]
fn memory_peaks_of_a_pack_have_to_fit() {
    let mut case = case(PACKS, "1x1:v100", "a 0 1 12, b 0 1 12");
    case.truth = pairs(&[(0, 1, 0.9), (1, 0, 0.9)]);
    let mut with = |mem_mib: u32| {
        case.jobs.iter_mut().for_each(|a| a.spec.knobs.mem_mib = mem_mib);
        case.run().chart()
    };
    // 16 GiB less a tenth.
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
fn a_free_gpu_of_another_class_is_taken_before_anybody_takes_turns() {
    expect![[r#"
        gpu0  aaaaa
        gpu1  aaaaa
        gpu2  .bbb
    "#]]
    .assert_eq(&case(TURNS, "1x3", "a 0 2 5, b 1 1 3").run().chart());
}

#[test]
fn an_idle_gpu_takes_a_suspended_job_from_a_crowded_node() {
    expect![[r#"
        gpu0  acaccccc
        gpu1  bbbaaaa
    "#]]
    .assert_eq(&case(TURNS, "2x1", "a 0 1 6, b 0 1 3, c 0 1 6").run().chart());
    // It has to pay: nobody has run long enough for a move that takes ten seconds.
    let mut dear = case(TURNS, "2x1", "a 0 1 6, b 0 1 3, c 0 1 6");
    dear.costs.migrate = Some(Span::from_secs(10.0));
    expect![[r#"
        gpu0  acacacacacac
        gpu1  bbb
    "#]]
    .assert_eq(&dear.run().chart());
}

#[test]
fn a_thinly_used_node_is_emptied_for_a_wide_job() {
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
fn a_spread_gang_is_pulled_together_if_that_is_faster() {
    let gang = |spread_speed: f64| {
        let mut case = case(TURNS, "2x2", "a 0 1 12, b 0 1 2, d 0 1 5, c 2 2 8");
        case.profiles[3].spread_speed = spread_speed;
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
fn nodes_go_to_the_class_that_lacks_most_of_its_share() {
    // Wide jobs ask for six of nine GPUs, so they get one of two nodes.
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

/// The case with the first job able to use so many GPUs, each with this exponent.
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
    // Three seconds alone, five with two GPUs, the rest alone.
    let ends = 8.0 + 15.0 - 3.0 - 5.0 * 2_f64.powf(0.9);
    assert_eq!(out.finished, [Some(ends.ceil() as u64), Some(11)]);
    assert!(out.journal.contains(r#""grows":2"#) && out.journal.contains(r#""shrinks_for":1"#));
    assert_eq!(out.metrics().moves, 2);
    // A change that takes a second does not keep the arrival waiting.
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
fn a_growth_waits_until_the_job_is_old_enough_to_be_worth_it() {
    // With two GPUs it would be 1.4 times as fast at least, so 2 s pay after 2 / (1 − 1/1.4) = 7 s.
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
    // The refusal is forgotten after some time.
    case.params.insert("refuse_s".into(), 4.into());
    expect![[r#"
        gpu0  aaaaaaaaaaaa
        gpu1  ...a....a
    "#]]
    .assert_eq(&case.run().chart());
}

#[test]
fn a_job_grows_by_powers_of_two_and_the_newest_growth_goes_first() {
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
fn only_who_can_use_more_gpus_grows_and_only_if_told_to() {
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
fn nobody_is_grown_where_jobs_take_turns() {
    // Two wide jobs cannot run at once, whatever e gives back.
    let jobs = "e 0 1 40, f 8 2 6, g 9 2 6, h 10 1 3";
    expect![[r#"
        gpu0  aaaaaaaaaaabcbcbcbcc...aaaaaaaa
        gpu1  ...aaaaabbcbcbcbcbcc
        gpu2  ........bbcdadadaaaaaaaaaaaaaaa
    "#]]
    .assert_eq(&elastic(GROWS, "1x3", jobs, 2, 1.0).run().chart());
}

#[test]
fn a_gang_that_spans_nodes_gets_grown_gpus_back_from_all_of_them() {
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

/// Jobs of these widths on one node, without costs.
fn random_turns(seed: u64, widest: u64) -> TestCase {
    let mut rng = Rng::stream(seed, 1);
    let gpus = 1 + rng.below(4);
    let jobs: Vec<String> = (0..2 + rng.below(7))
        .map(|i| {
            let width = 1 + rng.below(widest.min(gpus));
            format!("j{i} {} {width} {}", rng.below(6), 2 + rng.below(12))
        })
        .collect();
    let mut case = case(TURNS, &format!("1x{gpus}"), &jobs.join(","));
    case.params.insert("max_height".into(), 99.into());
    case
}

#[test]
fn everybody_runs_at_least_once_in_as_many_slices_as_there_are_jobs() {
    for seed in 0..300 {
        let case = random_turns(seed, 4);
        // Slices waited, and the most jobs there were meanwhile.
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
fn with_room_for_all_nobody_is_suspended_and_nobody_shares() {
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
fn nobody_has_more_than_it_asked_for_while_somebody_waits() {
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
    assert!(grown > 50, "only {grown} scenes in which somebody grows");
}

/// Follows who is where, and what moves do.
#[derive(Default)]
struct Moves {
    gpus: Vec<Vec<GpuIdx>>,
    moved: Vec<Option<Time>>,
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
                self.gpus[job.usize()].clear();
            }
        }
        for action in step.actions {
            let job = action.job().usize();
            let before = self.nodes();
            match action {
                Action::Stop(_) | Action::Suspend(_) => self.gpus[job].clear(),
                Action::Start(_, p) => self.gpus[job] = p.gpus.to_vec(),
                Action::Move(_, p) => {
                    self.gpus[job] = p.gpus.to_vec();
                    assert!(self.nodes() <= before, "a move makes another node busy");
                    let cool = self.moved[job].is_none_or(|at| step.at - at >= self.cool);
                    assert!(cool, "job {job} moves to and fro");
                    self.moved[job] = Some(step.at);
                    self.count += 1;
                }
                _ => {}
            }
        }
    }
}

#[test]
fn moves_never_spread_jobs_over_more_nodes_and_never_go_to_and_fro() {
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
