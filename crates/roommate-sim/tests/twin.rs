//! Compares the event-driven world with the tick world and checks invariants of any world.
#![allow(clippy::unwrap_used, reason = "this is a test")]

// The same random cases as the laws of the core use.
#[path = "../../roommate-core/tests/case/random.rs"]
mod random;

use random::CaseOptions;
use roommate_core::event::{Action, Event};
use roommate_core::idx::{Idx, IdxVec, JobIdx};
use roommate_core::interference::Undisturbed;
use roommate_core::job::Class;
use roommate_core::journal::gantt::Stays;
use roommate_core::journal::metrics::{Fold, Metrics};
use roommate_core::journal::replay::Replay;
use roommate_core::journal::{self, JobLine, Observer, StepView, Writer};
use roommate_core::math::rng::Rng;
use roommate_core::policy::{self, Entry, POLICIES};
use roommate_core::reason::Reason;
use roommate_core::state::Charge;
use roommate_core::testing::TestCase;
use roommate_core::time::{Span, Time};
use roommate_sim::fault::Faults;
use roommate_sim::serving::Measuring;
use roommate_sim::world::{Arrival, Setup, SimError, simulate};
use serde_json::json;
use std::sync::Arc;

/// Time and kind of each job's end, and its progress when it was interrupted.
#[derive(Debug, Default)]
struct Ends {
    finished: IdxVec<JobIdx, Option<Time>>,
    given_up: IdxVec<JobIdx, bool>,
    rejected: IdxVec<JobIdx, bool>,
    /// The most steps that were ever reported as done.
    most_done: IdxVec<JobIdx, f64>,
    failures: u64,
}

impl Observer for Ends {
    fn job(&mut self, _: &JobLine) {
        self.finished.push(None);
        self.given_up.push(false);
        self.rejected.push(false);
        self.most_done.push(0.0);
    }
    fn step(&mut self, step: &StepView<'_>) {
        for fact in step.facts {
            match fact {
                Event::Finished(j) => self.finished[*j] = Some(step.at),
                Event::Stopped { job, done } | Event::Failed { job, done, .. } => {
                    self.failures += u64::from(matches!(fact, Event::Failed { .. }));
                    let most = &mut self.most_done[*job];
                    *most = most.max(done.get());
                }
                _ => {}
            }
        }
        for note in step.notes.iter().filter(|n| n.reason == Reason::OutOfRetries) {
            self.given_up[note.job] = true;
        }
        for action in step.actions {
            if let Action::Reject(j, _) = action {
                self.rejected[*j] = true;
            }
        }
    }
}

struct Run {
    journal: String,
    ends: Ends,
    stays: Stays,
    metrics: Metrics,
}

/// Simulates a case of the tick world.
fn play(case: &TestCase, faults: Faults) -> Result<Run, SimError> {
    let entry = policy::find(&case.policy).unwrap();
    let setup = Setup {
        cluster: case.cluster.clone(),
        costs: case.costs,
        policy_name: case.policy.clone(),
        params: case.params.clone(),
        policy: entry.build(&case.params).unwrap(),
        known_pairs: None,
        truth: Box::new(Arc::clone(&case.truth)),
        faults,
        seed: case.seed,
        profiles: case.profiles.iter().map(|p| ("work".into(), p.clone())).collect(),
        teams: vec!["all".into()],
        measure: None,
        measuring: Measuring::default(),
        blind: None,
    };
    let arrivals = case.jobs.iter().map(|a| Arrival {
        at: Time(a.submit * case.tick.0),
        name: a.name.clone(),
        spec: a.spec.clone(),
        work: a.work,
        requests: None,
    });
    let folds = (Ends::default(), (Stays::default(), Fold::default()));
    let mut observer = (Writer::new(Vec::new()), folds);
    simulate(setup, arrivals, &mut observer, &mut |_| {})?;
    let (writer, (ends, (stays, fold))) = observer;
    let journal = String::from_utf8(writer.finish().unwrap()).unwrap();
    Ok(Run { journal, ends, stays, metrics: fold.metrics() })
}

/// Policies that give tenants fractional shares of a GPU, so that their steps end between ticks;
/// `mudi-priority` where its random parameters ask for parts.
const ODD_PARTS: [&str; 6] =
    ["mudi", "mudi-priority", "mudi-published", "gslice-like", "gpulets-like", "muxflow-like"];

/// A case in which every event falls on a tick, so that the two worlds must agree to the
/// microsecond.
fn exact_scene(seed: u64, entry: &Entry) -> TestCase {
    let preempts = !matches!(entry.name, "fifo" | "fifo-backfill" | "sjf");
    let mut case = random::case(
        seed,
        entry,
        CaseOptions { speeds: !preempts, stages: false, ..CaseOptions::WILD },
    );
    case.truth = Arc::new(Undisturbed);
    // Rounds of the released Gavel end with their last step, which is not at a tick.
    case.params.remove("released");
    // Steps of an elastic job that grows would end between ticks.
    case.profiles.iter_mut().for_each(|p| p.scaling = Some(0.0));
    // Growth pays off after 2, 4 or 8 times its cost, which is a tick, except for five GPUs.
    if let Some(keep) = case.params.get_mut("grow_keep").filter(|k| **k == json!(0.7)) {
        *keep = json!(1.0);
    }
    case.jobs.iter_mut().filter(|a| a.spec.gpus == 5).for_each(|a| a.spec.gpus_max = 5);
    if preempts {
        // A job that moves between speeds has fractions of steps left; here all GPU models have one
        // speed.
        case.cluster.gpu_models.iter_mut().for_each(|k| k.speed = 1.0);
    } else {
        // The shortest step is a quarter of a second.
        case.tick = Span(250_000);
    }
    // Offloading memory to the host lengthens steps by fractions of a tick.
    if let Some(least) = case.params.get_mut("min_memory") {
        *least = json!(1.0);
    }
    if let Some(bounds) = case.params.get_mut("bounds_gpu_s") {
        // Gangs whose size divides twelve reach such bounds at whole seconds.
        let whole = |(i, b): (usize, u64)| b.next_multiple_of(12) + 12 * i as u64;
        let old = bounds.as_array().unwrap().iter().map(|b| b.as_u64().unwrap());
        *bounds = json!(old.enumerate().map(whole).collect::<Vec<_>>());
        let all = case.cluster.gpus();
        case.jobs.retain(|a| 12 % a.spec.gpus == 0 || u32::from(a.spec.gpus) > all);
        if let Some(knob) = case.params.get_mut("promote_knob") {
            *knob = json!(knob.as_f64().unwrap().ceil());
        }
    }
    case
}

#[test]
fn both_worlds_finish_every_job_at_the_same_instant() {
    let (mut scenes, mut preempted) = (0, 0);
    for entry in POLICIES.iter().filter(|e| !ODD_PARTS.contains(&e.name)) {
        for seed in 0..400 {
            let case = exact_scene(seed, entry);
            if case.jobs.is_empty() {
                continue;
            }
            scenes += 1;
            let slow = case.run();
            let fast = play(&case, Faults::default()).unwrap();
            let ticks = |t: &Option<u64>| t.map(|t| Time(t * case.tick.0));
            let slow_finished: IdxVec<JobIdx, Option<Time>> =
                slow.finished.iter().map(ticks).collect();
            assert_eq!(fast.ends.finished, slow_finished, "{}", random::compact(&case));
            let (a, b) = (&fast.metrics, slow.metrics());
            let (fast_counts, slow_counts) =
                ((a.preemptions, a.moves, a.rejected), (b.preemptions, b.moves, b.rejected));
            assert_eq!(fast_counts, slow_counts, "{}", random::compact(&case));
            preempted += a.preemptions;
        }
    }
    assert!(scenes >= 1_500, "only {scenes} cases were compared");
    assert!(preempted > 1_000, "only {preempted} jobs were ever stopped");
}

#[test]
fn both_worlds_agree_in_the_presence_of_services() {
    let (mut scenes, mut with_room) = (0, 0);
    for entry in POLICIES.iter().filter(|e| !ODD_PARTS.contains(&e.name)) {
        for seed in 0..60 {
            let mut case = random::case(seed, entry, CaseOptions::PLAIN);
            case.truth = Arc::new(Undisturbed);
            if case.cluster.gpus() < 2 || case.params.contains_key("bounds_gpu_s") {
                continue;
            }
            // Every job fits on one GPU, and the service leaves one free.
            case.params.remove("dedicate_from");
            for job in &mut case.jobs {
                (job.spec.gpus, job.spec.gpus_max) = (1, 1);
            }
            let service = &mut case.jobs[0];
            (service.spec.class, service.spec.work) = (Class::Service, None);
            service.work = f64::INFINITY;
            scenes += 1;
            let slow = case.run();
            let context = random::compact(&case);
            let fast = play(&case, Faults::default()).unwrap_or_else(|e| panic!("{context}{e}"));
            let ticks = |t: &Option<u64>| t.map(|t| Time(t * case.tick.0));
            let slow_finished: IdxVec<JobIdx, Option<Time>> =
                slow.finished.iter().map(ticks).collect();
            assert!(slow.ended && slow_finished[JobIdx(0)].is_none(), "{context}");
            assert_eq!(fast.ends.finished, slow_finished, "{context}");
            let (a, b) = (&fast.metrics, slow.metrics());
            assert_eq!((a.jobs, a.finished), (b.jobs, b.finished), "{context}");
            assert_eq!(a.jobs as usize, case.jobs.len() - 1, "{context}");
            let mut replay = Replay::default();
            journal::read(fast.journal.as_bytes(), &mut replay).unwrap();
            assert_eq!((replay.difference, replay.refused), (None, None), "{context}");
            with_room += u32::from(a.preemptions == 0);
        }
    }
    assert!(scenes >= 500 && with_room > 100, "{scenes} {with_room}");
}

/// Faults that are frequent but let every job make progress.
fn some_faults(seed: u64) -> Faults {
    let mut rng = Rng::stream(seed, 90);
    let seconds = |s: u64| Span::from_secs(s as f64);
    Faults {
        node_mtbf: rng.chance(0.7).then(|| seconds(40 + rng.below(300))),
        node_repair: seconds(1 + rng.below(20)),
        crash: if rng.chance(0.7) { 0.3 * rng.unit() } else { 0.0 },
        checkpoint: seconds(rng.below(4)),
        user_errors: if rng.chance(0.3) { 0.5 } else { 0.0 },
    }
}

#[test]
fn under_faults_every_job_ends_once_with_consistent_totals() {
    let (mut failures, mut given_up) = (0, 0);
    for entry in POLICIES {
        for seed in 0..250 {
            let case = random::case(seed, entry, CaseOptions::WILD);
            let context = random::compact(&case);
            let run = play(&case, some_faults(seed)).unwrap_or_else(|e| panic!("{context}{e}"));
            for (i, job) in case.jobs.iter().enumerate() {
                let i = JobIdx::from_usize(i);
                let ends =
                    [run.ends.finished[i].is_some(), run.ends.given_up[i], run.ends.rejected[i]];
                assert_eq!(ends.iter().filter(|e| **e).count(), 1, "{context}job {i}: {ends:?}");
                given_up += u32::from(ends[1]);
                let most = run.ends.most_done[i];
                assert!(most <= job.work + 1e-6, "{context}job {i} did {most} steps");
                let kinds = case.cluster.gpu_models.iter().map(|k| k.speed);
                let measured = case.profiles.iter().flat_map(|p| p.model_speed.iter());
                let measured = measured.map(|(_, speed)| speed.get());
                let fed = case.profiles.iter().filter_map(|p| p.sensitivity.as_ref());
                let fed = fed.flat_map(|s| s.points().map(|p| p.1)).fold(1.0, f64::max);
                // A larger batch size raises the work per step at most in proportion.
                let trainings = case.profiles.iter().filter_map(|p| p.training.as_ref());
                let larger = trainings.map(|t| f64::from(t.batch_max) / f64::from(t.batch));
                let larger = larger.fold(1.0, f64::max);
                let fastest = larger * fed * kinds.chain(measured).fold(0.0, f64::max);
                let stays = run.stays.ended.iter().filter(|s| s.job == i);
                let held: f64 = stays.map(|s| (s.to - s.from).secs() * s.gpus.len() as f64).sum();
                let least = job.work * f64::from(job.spec.gpus) / fastest;
                let enough = !ends[0] || held >= least - 1e-3;
                assert!(enough, "{context}job {i} held {held} GPU-s for {least} of work");
            }
            failures += run.ends.failures;
        }
    }
    assert!(failures > 1_000 && given_up > 50, "too few faults: {failures} {given_up}");
}

#[test]
fn a_journal_with_faults_is_reproducible_and_replays() {
    for entry in POLICIES {
        for seed in 0..120 {
            let case = random::case(seed, entry, CaseOptions::WILD);
            let context = random::compact(&case);
            let run = play(&case, some_faults(seed)).unwrap();
            let again = play(&case, some_faults(seed)).unwrap();
            assert!(run.journal == again.journal, "{context}the same seed gave another journal");
            let mut folds = (Replay::default(), Fold::default());
            journal::read(run.journal.as_bytes(), &mut folds).unwrap();
            assert_eq!(folds.0.refused, None, "{context}");
            assert_eq!(folds.0.difference, None, "{context}");
            assert!(folds.0.steps > 0, "{context}nothing was replayed");
            assert_eq!(folds.1.metrics(), run.metrics, "{context}");
        }
    }
}

#[test]
fn another_seed_gives_other_faults() {
    // Otherwise the test above would compare nothing.
    let entry = policy::find("fifo").unwrap();
    let mut case = random::case(4, entry, CaseOptions::PLAIN);
    let faults = Faults { crash: 0.5, ..some_faults(1) };
    let one = play(&case, faults).unwrap().journal;
    case.seed = 5;
    let other = play(&case, faults).unwrap().journal;
    let steps = |j: &str| j.lines().skip(1).map(String::from).collect::<Vec<_>>();
    assert_ne!(steps(&one), steps(&other));
}

fn finished_s(case: &TestCase) -> Vec<f64> {
    let run = play(case, Faults::default()).unwrap();
    run.ends.finished.iter().map(|f| f.unwrap().secs()).collect()
}

#[test]
fn only_a_restart_is_charged_and_only_once() {
    // a runs 0–1, is preempted by b (1–3), restarts for 3 s and has 4 s of work left.
    let mut case = TestCase::new("srtf", "1x1", "a 0 1 5, b 1 1 2");
    case.costs.restart = Span::from_secs(3.0);
    assert_eq!(finished_s(&case), [10.0, 3.0]);
    case.costs.start = Span::from_secs(0.5);
    assert_eq!(finished_s(&case), [11.0, 3.5], "first starts have a cost of their own");
}

#[test]
fn a_job_that_is_never_stopped_pays_no_restart() {
    let mut calm = 0;
    // Chronus plans with the restart cost, and Gavel's rounds are at least twice as long, so an
    // expensive restart changes which jobs they start.
    let plans_with_it = |e: &&Entry| e.name == "chronus" || e.name.starts_with("gavel");
    for entry in POLICIES.iter().filter(|e| !plans_with_it(e)) {
        for seed in 0..150 {
            let mut case =
                random::case(seed, entry, CaseOptions { costs: false, ..CaseOptions::WILD });
            let free = play(&case, Faults::default()).unwrap();
            // With restarts this expensive, a policy that does restart jobs might never finish
            // them.
            let failed = free.ends.failures > 0;
            if free.metrics.preemptions + free.metrics.moves == 0 && !failed {
                calm += 1;
                case.costs.restart = Span::from_secs(62.0);
                let dear = play(&case, Faults::default()).unwrap();
                assert_eq!(dear.ends.finished, free.ends.finished, "{}", random::compact(&case));
            }
        }
    }
    assert!(calm > 400, "only {calm} runs without a restart");
}

#[test]
fn charge_at_every_step_applies_to_all_running_jobs() {
    // At 4 b arrives: a has lost 1 of its 4 s and has 7 left, until 11. b runs from 4 to 9, and at
    // 9 a has lost another second of the 5 since then: 3 left, until 12.
    let mut case = TestCase::new("fifo", "1x2", "a 0 1 10, b 4 1 5");
    case.costs.restart = Span::from_secs(1.0);
    case.costs.quirks.charge = Charge::EveryStep;
    assert_eq!(finished_s(&case), [12.0, 9.0]);
    // An interval shorter than the cost is lost completely, but no more than that: c arrives half a
    // second after b, so a and b lose only that half second.
    let mut case = TestCase::new("fifo", "1x3", "a 0 1 20, b 8 1 20, c 9 1 2");
    case.tick = Span(500_000);
    case.costs.restart = Span::from_secs(1.0);
    case.costs.quirks.charge = Charge::EveryStep;
    // a: 3 of 4 s, then 0 of 0.5 s, then c (4.5–6.5) ends: 1 of 2 s; 16 left, until 22.5. b would
    // end at 24 without its losses: 0.5 s at 4.5, 1 s at 6.5 and 1 s at 22.5.
    assert_eq!(finished_s(&case), [22.5, 26.5, 6.5]);
}

#[test]
fn an_unplaceable_job_is_reported_despite_node_failures() {
    // Its CPU request fits three GPUs on each node, but six GPUs need one node completely.
    let mut case = TestCase::new("fifo", "2x4:3c", "a 0 6 5, b 1 1 2");
    case.jobs[0].spec.knobs.cpu_milli = 1_000;
    let quiet = play(&case, Faults::default()).err();
    assert!(matches!(quiet, Some(SimError::Stuck { waiting: 2, .. })), "{quiet:?}");
    let faults = Faults { node_mtbf: Some(Span::from_secs(9.0)), ..Faults::default() };
    let noisy = play(&case, faults).err();
    assert!(matches!(noisy, Some(SimError::Circles { left: 2, .. })), "{noisy:?}");
}

#[test]
fn unsorted_submissions_are_refused() {
    let mut case = TestCase::new("fifo", "1x1", "a 0 1 5, b 9 1 2");
    case.jobs.reverse();
    let refused = play(&case, Faults::default()).err();
    assert_eq!(refused, Some(SimError::OutOfOrder { name: "a".into() }));
}
