//! Tests of `IADeep`.

use crate::engine::Engine;
use crate::event::{Action, Event, Sample};
use crate::idx::{Idx, IdxVec, JobIdx, ProfileIdx};
use crate::interference::{Estimate, Interference, Truth, Undisturbed};
use crate::job::{Class, Phase, Spec};
use crate::journal::{self, Observer, StepView};
use crate::knobs::Knobs;
use crate::number::{Number, Number32};
use crate::performance::goodput::{self, Training};
use crate::policy;
use crate::profile::Profile;
use crate::reason::{Note, Reason};
use crate::state::{Costs, State};
use crate::testing::{Outcome, TestCase};
use crate::time::{Span, Time};
use expect_test::{Expect, expect};
use serde_json::json;
use std::sync::Arc;

/// Steps have a fixed part and a part that grows with the batch size; roommates slow each other
/// down in proportion to their utilisation.
#[derive(Clone, Copy)]
struct Curves {
    fixed: f64,
    harm: f64,
}

impl Curves {
    fn alone_s(self, times: f64) -> f64 {
        self.fixed + (1.0 - self.fixed) * times
    }

    fn busy(self, times: f64) -> f64 {
        (1.0 - self.fixed) * times / self.alone_s(times)
    }

    /// Length of a step at `times` the own batch size, beside roommates at these multiples.
    fn step_s(self, times: f64, others: &[f64]) -> f64 {
        let harm: f64 = others.iter().map(|o| self.harm * self.busy(*o)).sum();
        self.alone_s(times) * (1.0 + harm)
    }
}

impl Truth for Curves {}

impl Interference for Curves {
    fn speed(&self, state: &State, _: u8, tenants: &[(JobIdx, Knobs)], of: usize) -> Estimate {
        let times = |i: usize| {
            let own = state.profile(tenants[i].0).training.as_ref().map_or(1, |t| t.batch);
            let batch = tenants[i].1.batch;
            if batch == 0 { 1.0 } else { f64::from(batch) / f64::from(own) }
        };
        let others: Vec<f64> = (0..tenants.len()).filter(|i| *i != of).map(times).collect();
        Estimate::certain(1.0 / self.step_s(times(of), &others))
    }
}

fn case(cluster: &str, jobs: &str, truth: Curves, params: serde_json::Value) -> TestCase {
    let mut case = TestCase::new("iadeep", cluster, jobs);
    let serde_json::Value::Object(params) = params else { panic!("parameters are an object") };
    case.params = params;
    case.truth = Arc::new(truth);
    case
}

/// Gives each job of a case a training profile with this noise scale.
fn tunable(mut case: TestCase, batch: u32, noise: f32) -> TestCase {
    for (i, job) in case.jobs.iter_mut().enumerate() {
        let training = Some(Training::around(batch, noise));
        case.profiles.push(Profile { training, ..Profile::of_step(1.0) });
        job.spec.profile = ProfileIdx::from_usize(i + 1);
    }
    case
}

/// Notes and tune actions of a journal.
#[derive(Default)]
struct Recorded {
    notes: Vec<(f64, Note)>,
    tunes: Vec<(f64, JobIdx, u32)>,
}

impl Observer for Recorded {
    fn step(&mut self, step: &StepView<'_>) {
        let at = step.at.secs();
        self.notes.extend(step.notes.iter().map(|n| (at, *n)));
        for action in step.actions {
            if let Action::Tune(job, knobs) = action {
                self.tunes.push((at, *job, knobs.batch));
            }
        }
    }
}

fn recorded(outcome: &Outcome) -> Recorded {
    let mut recorded = Recorded::default();
    journal::read(outcome.journal.as_bytes(), &mut recorded).unwrap();
    recorded
}

fn draw(case: &TestCase, expected: &Expect) {
    let outcome = case.run();
    assert!(outcome.ended);
    let name = |j: JobIdx| case.job(j).name.clone();
    let mut text = outcome.chart();
    for (at, note) in recorded(&outcome).notes {
        text += &format!("{at:>4} s  {}: {}\n", name(note.job), note.reason.describe(&name));
    }
    expected.assert_eq(&text);
}

#[test]
fn jobs_share_where_that_helps_and_wait_where_it_does_not() {
    let jobs = "a 0 1 20, b 0 1 20, c 2 1 20";
    let mild = Curves { fixed: 0.5, harm: 0.2 };
    draw(
        &case("1x2", jobs, mild, json!({})),
        &expect![[r#"
        gpu0  aa####################cc
        gpu1  bbbbbbbbbbbbbbbbbbbb
           2 s  c: starts beside job a: 1.49 times as long as alone, by rule of thumb, as nothing similar was measured yet
    "#]],
    );
    // c joins by rule of thumb and is measured; d is predicted from that, and waits for b, which
    // leaves soon.
    let rough = Curves { fixed: 0.0, harm: 1.8 };
    let jobs = "a 0 1 60, b 0 1 60, c 1 1 60, d 50 1 60";
    draw(
        &case("1x2", jobs, rough, json!({})),
        &expect![[r#"
            gpu0  a##################################################################################c
            gpu1  bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbdddddddddddddddddddddddddddddd
               1 s  c: starts beside job a: 1.49 times as long as alone, by rule of thumb, as nothing similar was measured yet
              50 s  d: waits: sharing with job b would add 26.0s to the completion times of all jobs
        "#]],
    );
}

#[test]
fn gangs_and_services_do_not_share() {
    let mut gangs =
        case("1x2", "A 0 2 10, b 1 1 5, c 2 1 5", Curves { fixed: 0.5, harm: 0.0 }, json!({}));
    draw(
        &gangs,
        &expect![[r#"
        gpu0  aaaaaaaaaabbbbb
        gpu1  aaaaaaaaaaccccc
           1 s  b: does not fit: needs 1 GPUs, 0 idle in the cluster
           2 s  c: does not fit: needs 1 GPUs, 0 idle in the cluster
    "#]],
    );
    gangs.jobs[1].spec.class = Class::Service;
    gangs.jobs[1].spec.gpus = 1;
    let chart = gangs.run().chart();
    assert!(!chart.contains('#'), "{chart}");
}

#[test]
fn both_batches_are_found_together() {
    let truth = Curves { fixed: 0.6, harm: 0.9 };
    let case =
        tunable(case("1x1", "a 0 1 900, b 0 1 900", truth, json!({"measure_s": 2})), 64, 600.0);
    let outcome = case.run();
    assert!(outcome.ended);
    let Recorded { notes, tunes } = recorded(&outcome);
    let settled = |job: u32| {
        let mut of = notes.iter().filter(|(_, n)| n.job == JobIdx(job));
        let settled = of.find_map(|(_, n)| match n.reason {
            Reason::BatchSettled { batch, measured, .. } => Some((batch, measured)),
            _ => None,
        });
        settled.unwrap()
    };
    let ((a, measured), (b, _)) = (settled(0), settled(1));
    assert!((3..=17).contains(&measured), "{measured}");
    // Both batch sizes were changed, and the pair is within 5 % of the best of all pairs.
    assert!([0, 1].iter().all(|j| tunes.iter().any(|t| t.1 == JobIdx(*j))), "{tunes:?}");
    let pd = |a: u32, b: u32| {
        let [x, y] = [a, b].map(|m| f64::from(m) / 64.0);
        let of = |m: u32, own: f64, other: f64| {
            goodput::degradation(1.0, truth.step_s(own, &[other]), 64.0, f64::from(m), 600.0)
        };
        f64::midpoint(of(a, x, y), of(b, y, x))
    };
    let all = (16..=256).flat_map(|a| (16..=256).map(move |b| (a, b)));
    let best = all.map(|(a, b)| pd(a, b)).fold(f64::INFINITY, f64::min);
    assert!(pd(a, b) < 1.05 * best, "{a} {b}: {} instead of {best}", pd(a, b));
    assert!(pd(64, 64) > 1.05 * best, "tuning must be able to gain: {best}");
    // The job that is left alone is tuned again, from its current batch size.
    let ends: Vec<u64> = outcome.finished.iter().map(|f| f.unwrap()).collect();
    let first = *ends.iter().min().unwrap() as f64;
    let last = *ends.iter().max().unwrap() as f64;
    assert!(last - first < 10.0 || tunes.iter().any(|t| t.0 >= first), "{ends:?}");
}

#[test]
fn tuning_reduces_completion_times() {
    let truth = Curves { fixed: 0.6, harm: 0.6 };
    let run = |params: serde_json::Value| {
        let case = case("1x2", "a 0 1 800, b 0 1 800, c 0 1 800, d 0 1 800", truth, params);
        let outcome = tunable(case, 64, 300.0).run();
        outcome.finished.iter().map(|f| f.unwrap()).sum::<u64>()
    };
    let (on, off) = (run(json!({"measure_s": 2})), run(json!({"tune": false})));
    assert!(on < off, "{on} {off}");
}

#[test]
fn without_the_tuner_batches_stay_as_they_are() {
    let truth = Curves { fixed: 0.6, harm: 0.6 };
    let jobs = "a 0 1 200, b 0 1 200, c 40 1 200";
    for tune in [false, true] {
        let case = case("1x1", jobs, truth, json!({"measure_s": 2, "tune": tune}));
        let Recorded { notes, tunes } = recorded(&tunable(case, 64, 300.0).run());
        assert_eq!(!tunes.is_empty(), tune, "{tunes:?}");
        assert_eq!(notes.iter().any(|(_, n)| is_settled(&n.reason)), tune, "{notes:?}");
    }
}

/// A world of one GPU in which jobs can ignore requests; time advances from wake to wake.
struct Bench {
    engine: Engine,
    now: Time,
    wake: Option<Time>,
    truth: Curves,
    batches: IdxVec<JobIdx, u32>,
    noise: f32,
    /// A job that does not apply requested batch sizes.
    unresponsive: Option<JobIdx>,
    /// A job whose noise scale is not known yet.
    without_noise: Option<JobIdx>,
    /// Least batch size at which a job runs out of memory.
    oom_batch: u32,
    notes: Vec<Note>,
    tunes: Vec<(JobIdx, u32)>,
    failures: u32,
}

const OWN: u32 = 64;

impl Bench {
    fn new(jobs: u32) -> Self {
        Self::with_noise(jobs, 300.0)
    }

    fn with_noise(jobs: u32, noise: f32) -> Self {
        let entry = policy::find("iadeep").unwrap();
        let policy = entry.build(&policy::Params::new()).unwrap();
        let costs = Costs { backoff: Span::from_secs(1.0), ..Costs::default() };
        let cluster = "1x1".parse().unwrap();
        let mut engine = Engine::new(&cluster, costs, policy, Box::new(Undisturbed), 0);
        let training = Some(Training::around(OWN, 300.0));
        let profile = engine.add_profile(Profile { training, ..Profile::of_step(1.0) });
        for _ in 0..jobs {
            let mut spec = Spec::training(1, 1e6, profile);
            spec.retries = 99.into();
            engine.add_job(spec);
        }
        let mut bench = Self {
            engine,
            now: Time::ZERO,
            wake: None,
            truth: Curves { fixed: 0.6, harm: 0.2 },
            batches: vec![0; jobs as usize].into(),
            noise,
            unresponsive: None,
            without_noise: None,
            oom_batch: u32::MAX,
            notes: Vec::new(),
            tunes: Vec::new(),
            failures: 0,
        };
        bench.report((0..jobs).map(|j| Event::Submitted(JobIdx(j))).collect());
        bench
    }

    fn report(&mut self, mut facts: Vec<Event>) {
        while !facts.is_empty() || self.wake.is_some_and(|w| w <= self.now) {
            let step = self.engine.step(self.now, &facts);
            assert!(step.contradictions.is_empty());
            self.notes.extend(step.notes);
            self.wake = step.wake;
            let actions = step.actions.to_vec();
            facts = actions.iter().flat_map(|a| self.act(a)).collect();
            if !actions.is_empty() {
                let fails =
                    |f: &Event| if let Event::Failed { job, .. } = f { Some(*job) } else { None };
                let failed: Vec<JobIdx> = facts.iter().filter_map(fails).collect();
                let measured = self.measure();
                let alive =
                    |e: &Event| !matches!(e, Event::Sampled { job, .. } if failed.contains(job));
                facts.extend(measured.into_iter().filter(alive));
            }
        }
    }

    fn act(&mut self, action: &Action) -> Vec<Event> {
        match action {
            Action::Start(job, p) => {
                self.batches[*job] = if p.knobs.batch == 0 { OWN } else { p.knobs.batch };
                vec![Event::Started(*job)]
            }
            Action::Tune(job, knobs) => {
                self.tunes.push((*job, knobs.batch));
                if knobs.batch >= self.oom_batch {
                    self.failures += 1;
                    let done = Number::default();
                    return vec![Event::Failed { job: *job, reason: Reason::OutOfMemory, done }];
                }
                if self.unresponsive != Some(*job) {
                    self.batches[*job] = knobs.batch;
                }
                vec![Event::Tuned(*job)]
            }
            other => panic!("unexpected {other:?}"),
        }
    }

    fn measure(&self) -> Vec<Event> {
        let state = self.engine.state();
        let failed = |j: &JobIdx| state.job(*j).gpus.is_empty();
        let there = self.batches.indices().filter(|j| !failed(j));
        let times = |j: &JobIdx| f64::from(self.batches[*j]) / f64::from(OWN);
        let all: Vec<JobIdx> = there.collect();
        let sample =
            |j: &JobIdx| Sample {
                step_s: Number::of(self.truth.step_s(
                    times(j),
                    &all.iter().filter(|o| *o != j).map(times).collect::<Vec<_>>(),
                )),
                noise_scale: Number32::of(if self.without_noise == Some(*j) {
                    0.0
                } else {
                    self.noise
                }),
                batch: self.batches[*j],
                ..Sample::default()
            };
        all.iter().map(|j| Event::Sampled { job: *j, sample: sample(j) }).collect()
    }

    /// Lets time pass for so many seconds.
    fn pass(&mut self, seconds: f64) {
        let end = self.now + Span::from_secs(seconds);
        while let Some(wake) = self.wake.filter(|w| *w <= end) {
            self.now = wake;
            self.report(Vec::new());
        }
        self.now = end;
    }

    fn notes_of(&self, job: u32, is: impl Fn(&Reason) -> bool) -> usize {
        self.notes.iter().filter(|n| n.job == JobIdx(job) && is(&n.reason)).count()
    }
}

fn is_settled(reason: &Reason) -> bool {
    matches!(reason, Reason::BatchSettled { .. })
}

#[test]
fn a_batch_size_that_is_not_applied_is_noted() {
    // In the artifact the final batch size was written while its flag said not to read it.
    let mut bench = Bench::new(2);
    bench.unresponsive = Some(JobIdx(1));
    bench.pass(600.0);
    assert_eq!(
        bench.notes_of(1, |w| matches!(w, Reason::BatchNotApplied { .. })),
        1,
        "{:?}",
        bench.notes
    );
    assert_eq!(bench.notes_of(1, is_settled), 0);
    // The other job is tuned all the same.
    assert_eq!(bench.notes_of(0, is_settled), 1);
    assert_ne!(bench.batches[JobIdx(0)], OWN);
    let (unresponsive, _) = bench.tunes.iter().rev().find(|t| t.0 == JobIdx(1)).unwrap();
    assert_eq!(*unresponsive, JobIdx(1));
    let requests = bench.tunes.iter().filter(|t| t.0 == JobIdx(1)).count();
    assert_eq!(requests, 1, "there is no second request");
}

#[test]
fn a_batch_size_that_ran_out_of_memory_is_not_retried() {
    let mut bench = Bench::new(1);
    bench.oom_batch = 100;
    bench.pass(3_000.0);
    assert!(bench.failures > 0, "no job ran out of memory");
    let tried: Vec<u32> = bench.tunes.iter().filter(|t| t.1 >= 100).map(|t| t.1).collect();
    assert!(tried.is_sorted_by(|a, b| a > b), "{tried:?}");
    assert_eq!(bench.engine.state().job(JobIdx(0)).phase, Phase::Running);
    assert!(
        bench.batches[JobIdx(0)] < 100 && bench.notes_of(0, is_settled) > 0,
        "{:?}",
        bench.notes
    );
}

#[test]
fn a_large_change_of_noise_starts_a_new_search() {
    let mut bench = Bench::new(1);
    bench.pass(600.0);
    let before = (bench.tunes.len(), bench.batches[JobIdx(0)]);
    for (noise, again) in [(500.0, false), (3_000.0, true)] {
        bench.noise = noise;
        let facts = bench.measure();
        bench.report(facts);
        bench.pass(600.0);
        assert_eq!(bench.tunes.len() > before.0, again, "{noise}: {:?}", bench.tunes);
    }
    assert!(bench.batches[JobIdx(0)] > before.1, "more noise, larger batch");
    assert_eq!(bench.notes_of(0, |w| matches!(w, Reason::NoiseDrifted { from: 300, to: 3000 })), 1);
}

#[test]
fn oscillating_noise_does_not_keep_a_gpu_searching() {
    let mut bench = Bench::new(1);
    for minute in 0..120 {
        bench.noise = [300.0, 3_000.0][minute % 2];
        let facts = bench.measure();
        bench.report(facts);
        bench.pass(60.0);
    }
    // A search takes about half a minute.
    let again = bench.notes_of(0, |w| matches!(w, Reason::NoiseDrifted { .. }));
    assert!((2..=24).contains(&again), "{again} times: {:?}", bench.notes);
}

#[test]
fn arrivals_keep_what_was_tuned() {
    // The artifact reset all jobs to m0 − 1 at each arrival.
    let mut bench = Bench::new(1);
    bench.pass(600.0);
    let tuned = bench.batches[JobIdx(0)];
    assert_ne!(tuned, OWN);
    let spec = bench.engine.state().spec(JobIdx(0)).clone();
    bench.engine.add_job(spec);
    bench.batches.push(0);
    let from = bench.tunes.len();
    bench.report(vec![Event::Submitted(JobIdx(1))]);
    bench.now += Span::from_secs(1.0);
    assert_eq!(
        (bench.tunes.len(), bench.batches[JobIdx(0)]),
        (from, tuned),
        "the search starts from the tuned batch size"
    );
    bench.pass(600.0);
    assert_eq!(bench.notes_of(1, is_settled), 1);
    assert_eq!(bench.notes_of(1, |w| matches!(w, Reason::Beside { .. })), 1);
}

#[test]
fn a_job_measured_late_is_tuned_with_its_roommates() {
    let mut bench = Bench::new(1);
    bench.without_noise = Some(JobIdx(1));
    let spec = bench.engine.state().spec(JobIdx(0)).clone();
    bench.engine.add_job(spec);
    bench.batches.push(0);
    bench.report(vec![Event::Submitted(JobIdx(1))]);
    bench.pass(1_200.0);
    assert!(bench.notes_of(0, is_settled) > 0, "{:?}", bench.notes);
    assert_eq!(bench.notes_of(1, is_settled), 0);
    bench.without_noise = None;
    let facts = bench.measure();
    bench.report(facts);
    bench.pass(600.0);
    assert_eq!(bench.notes_of(1, is_settled), 1, "{:?}", bench.notes);
}

#[test]
fn jobs_that_are_all_measured_late_are_tuned() {
    // No job reports its noise scale when the GPU is first considered.
    let mut bench = Bench::with_noise(2, 0.0);
    bench.pass(1_200.0);
    assert!(bench.tunes.is_empty());
    bench.noise = 300.0;
    let facts = bench.measure();
    bench.report(facts);
    bench.pass(600.0);
    let settled = [bench.notes_of(0, is_settled), bench.notes_of(1, is_settled)];
    assert_eq!(settled, [1, 1], "{:?}", bench.notes);
}

#[test]
fn the_device_is_chosen_among_all_nodes() {
    // The artifact chose a node by its memory, and compared interference only inside it.
    let entry = policy::find("iadeep").unwrap();
    let policy = entry.build(&policy::Params::new()).unwrap();
    let cluster = "2x1".parse().unwrap();
    let mut engine = Engine::new(&cluster, Costs::default(), policy, Box::new(Undisturbed), 0);
    let heavy = engine.add_profile(Profile::of_step(1.0));
    let light = engine.add_profile(Profile::of_step(1.0));
    let jobs = [heavy, light, heavy].map(|profile| engine.add_job(Spec::training(1, 1e5, profile)));
    let mut now = Time::ZERO;
    for (job, sm_util) in jobs.iter().zip([0.9, 0.1]) {
        let [sm_util, dram_util] = [sm_util, 0.1].map(Number32::of);
        let sample = Sample { sm_util, dram_util, ..Sample::default() };
        engine.step(now, &[Event::Submitted(*job)]);
        engine.step(now, &[Event::Started(*job), Event::Sampled { job: *job, sample }]);
        now += Span::from_secs(60.0);
    }
    let step = engine.step(now, &[Event::Submitted(jobs[2])]);
    assert!(
        matches!(step.notes[0].reason, Reason::Beside { job, .. } if job == jobs[1]),
        "{step:?}"
    );
    let Action::Start(_, place) = step.actions[0].clone() else { panic!("{step:?}") };
    assert_eq!(place.gpus, engine.state().job(jobs[1]).gpus);
}

/// The index compared with a search that examines every GPU.
mod index {
    use crate::engine::Engine;
    use crate::event::{Event, Sample};
    use crate::idx::{GpuIdx, Idx, JobIdx, ProfileIdx};
    use crate::interference::Undisturbed;
    use crate::job::Spec;
    use crate::knobs::Knobs;
    use crate::math::rng::Rng;
    use crate::number::{Number, Number32};
    use crate::performance::goodput::{LrRule, Noise, Training};
    use crate::plan::Plan;
    use crate::policy::Policy;
    use crate::policy::iadeep::colocation_index::{self, ColocationIndex, Profiles, can_share};
    use crate::policy::iadeep::tuning_sessions;
    use crate::policy::iadeep::{IaDeep, Params, TRIES};
    use crate::profile::Profile;
    use crate::state::Costs;
    use crate::testing::confirmation;
    use crate::time::{Span, Time};

    /// The policy; after each call the index is compared with the obvious search.
    struct Twin(IaDeep);

    impl Policy for Twin {
        fn schedule(&mut self, plan: &mut Plan<'_>) {
            self.0.schedule(plan);
            let IaDeep { tuning, pd, params, .. } = &self.0;
            let mut fresh = ColocationIndex::new(plan, tuning, params.max_tenants, pd);
            if let Some(kept) = &self.0.index {
                assert!(kept.knows_the_same_as(&fresh), "{kept:?}, not {fresh:?}");
            }
            for job in plan.pending.iter().filter(|j| plan.spec(*j).gpus == 1) {
                let harm = |new, there: &Profiles| self.0.harm(new, there);
                let all = obvious(&self.0, plan, job);
                assert_eq!(fresh.first(plan, job, TRIES, harm), all[..all.len().min(TRIES)]);
                assert_eq!(fresh.best(plan, job, harm), all.first().map(|d| d.1));
            }
        }
    }

    fn obvious(policy: &IaDeep, plan: &Plan<'_>, job: JobIdx) -> Vec<(f64, GpuIdx)> {
        let mut devices = Vec::new();
        for (i, gpu) in plan.gpus.iter().enumerate() {
            let (idx, count) = (GpuIdx::from_usize(i), gpu.tenants.len());
            let open = count > 0
                && count < usize::from(policy.params.max_tenants)
                && plan.spec(job).allows(gpu.gpu_model)
                && !policy.tuning.is_busy(idx)
                && gpu.tenants.iter().all(|t| can_share(plan, *t));
            if open && tuning_sessions::could_hold(plan, job, idx) {
                devices.push((
                    policy.harm(plan.spec(job).profile, &colocation_index::profiles_on(plan, idx)),
                    idx,
                ));
            }
        }
        devices.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        devices
    }

    #[test]
    fn the_index_finds_what_the_obvious_search_finds() {
        for seed in 0..6 {
            let mut rng = Rng::stream(seed, 140);
            let params = Params {
                tune: seed % 3 > 0,
                max_tenants: 2 + (seed % 2) as u8,
                ..Params::default()
            };
            let policy = Box::new(Twin(IaDeep::new(params)));
            let cluster = "3x4:v100,2x4:a100".parse().unwrap();
            let mut engine =
                Engine::new(&cluster, Costs::default(), policy, Box::new(Undisturbed), seed);
            for _ in 0..5 {
                let (lr, noise) = (LrRule::default(), Noise { start: 1e3, end: 1e3 });
                let memory = Vec::new();
                let t = Training { batch: 64, batch_min: 16, batch_max: 512, lr, noise, memory };
                engine.add_profile(Profile { training: Some(t), ..Profile::of_step(0.1) });
            }
            let mut now = Time::ZERO;
            for _ in 0..150 {
                now += Span::from_secs(1.0 + rng.below(4) as f64);
                let mut facts = Vec::new();
                if rng.below(3) > 0 {
                    let profile = ProfileIdx(rng.below(5) as u32);
                    let mem_mib = 2_000 * (1 + rng.below(4) as u32);
                    let knobs = Knobs { mem_mib, ..Knobs::WHOLE };
                    let gpus = if rng.below(10) == 0 { 2 } else { 1 };
                    let spec = Spec { knobs, ..Spec::training(gpus, 1e9, profile) };
                    facts.push(Event::Submitted(engine.add_job(spec)));
                }
                let running: Vec<JobIdx> = engine.state().placed.iter().collect();
                for job in &running {
                    let knobs = engine.state().job(*job).knobs;
                    let batch = if knobs.batch == 0 { 64 } else { knobs.batch };
                    let step_s = Number::of(0.1 + 0.1 * rng.unit());
                    let noise_scale = Number32::of(1e3);
                    let sample = Sample { step_s, noise_scale, batch, ..Sample::default() };
                    facts.push(Event::Sampled { job: *job, sample });
                }
                if rng.below(8) == 0 && !running.is_empty() {
                    let ends = running[rng.below(running.len() as u64) as usize];
                    facts.push(Event::Finished(ends));
                }
                let step = engine.step(now, &facts);
                let facts: Vec<Event> = step.actions.iter().filter_map(confirmation).collect();
                engine.step(now, &facts);
            }
            assert!(engine.state().pending.len() > 3, "no job waits: {seed}");
            let shared = |g: &crate::state::Gpu| g.tenants.len() > 1;
            assert!(engine.state().gpus.iter().any(shared), "no jobs share: {seed}");
        }
    }
}
