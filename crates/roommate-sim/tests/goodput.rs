//! Batch sizes that change during a run: measured step times, progress by goodput, out of memory.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use roommate_core::event::{Action, Event, Sample};
use roommate_core::idx::{GpuIdx, Idx, JobIdx, ProfileIdx};
use roommate_core::interference::{self, Undisturbed};
use roommate_core::job::Spec;
use roommate_core::journal::{self, Observer, StepView, Writer};
use roommate_core::knobs::Knobs;
use roommate_core::performance::goodput::{LrRule, Noise, Training, goodput_factor};
use roommate_core::plan::Plan;
use roommate_core::policy::{Params, Policy};
use roommate_core::profile::Profile;
use roommate_core::reason::Reason;
use roommate_core::state::Costs;
use roommate_core::time::{Span, Time};
use roommate_sim::fault::Faults;
use roommate_sim::serving::Measuring;
use roommate_sim::truth::{Truth, h200};
use roommate_sim::world::{Arrival, Setup, simulate};
use std::sync::Arc;

/// Starts every job on the first GPU at its own batch size, and tunes by a list of (seconds, job,
/// batch size).
struct Script {
    turns: Vec<(f64, u32, u32)>,
    mem_mib: u32,
    /// Steps that the engine must believe the first job has done at 60 s.
    believed: Option<f64>,
}

impl Policy for Script {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        let pending: Vec<JobIdx> = plan.pending.iter().collect();
        for job in pending {
            let knobs = Knobs { sm_permille: 0, mem_mib: self.mem_mib, ..plan.spec(job).knobs };
            plan.place(job, &[GpuIdx(0)], knobs).unwrap();
        }
        if let Some(done) = self.believed {
            let at = Time::from_secs(60.0);
            if plan.now == at {
                near(plan.done(JobIdx(0)), done);
                self.believed = None;
            } else {
                plan.wake_at(at);
            }
        }
        while let Some((at, job, batch)) = self.turns.first().copied() {
            if Time::from_secs(at) > plan.now {
                plan.wake_at(Time::from_secs(at));
                break;
            }
            self.turns.remove(0);
            let job = JobIdx(job);
            if plan.profile(job).training.is_some() {
                let knobs = Knobs { batch, ..plan.job(job).knobs };
                plan.tune(job, knobs).unwrap();
            }
        }
    }
}

/// Facts and tunings of a run.
#[derive(Default)]
struct Recorded {
    finished: Vec<(f64, JobIdx)>,
    failed: Vec<(f64, Reason)>,
    samples: Vec<(f64, JobIdx, Sample)>,
    tuned: Vec<Knobs>,
}

impl Observer for Recorded {
    fn step(&mut self, step: &StepView<'_>) {
        let at = step.at.secs();
        for fact in step.facts {
            match fact {
                Event::Finished(job) => self.finished.push((at, *job)),
                Event::Failed { reason, .. } => self.failed.push((at, *reason)),
                Event::Sampled { job, sample } => self.samples.push((at, *job, *sample)),
                _ => {}
            }
        }
        for action in step.actions {
            match action {
                Action::Tune(_, knobs) => self.tuned.push(*knobs),
                Action::Start(_, p) if p.knobs.batch > 0 => self.tuned.push(p.knobs),
                _ => {}
            }
        }
    }
}

struct Case {
    trainings: Vec<Training>,
    names: Vec<&'static str>,
    cluster: &'static str,
    truth: Box<dyn interference::Truth>,
    turns: Vec<(f64, u32, u32)>,
    mem_mib: u32,
    tune_s: f64,
    work: f64,
    believed: Option<f64>,
}

impl Case {
    fn new(trainings: Vec<Training>, turns: &[(f64, u32, u32)]) -> Self {
        Self {
            names: vec!["work"; trainings.len()],
            trainings,
            cluster: "1x1",
            truth: Box::new(Undisturbed),
            turns: turns.to_vec(),
            mem_mib: 0,
            tune_s: 0.0,
            work: 100.0,
            believed: None,
        }
    }

    fn profiles(&self) -> Vec<(String, Profile)> {
        let of = |(name, training): (&&str, &Training)| {
            let profile = Profile { training: Some(training.clone()), ..Profile::of_step(1.0) };
            ((*name).to_owned(), profile)
        };
        self.names.iter().zip(&self.trainings).map(of).collect()
    }

    fn run(self) -> (Recorded, String) {
        let profiles = self.profiles();
        let work = self.work;
        let setup = Setup {
            cluster: self.cluster.parse().unwrap(),
            costs: Costs {
                tune: Span::from_secs(self.tune_s),
                backoff: Span::from_secs(5.0),
                restart: Span::ZERO,
                ..Costs::default()
            },
            policy_name: "script".into(),
            params: Params::new(),
            policy: Box::new(Script {
                turns: self.turns,
                mem_mib: self.mem_mib,
                believed: self.believed,
            }),
            known_pairs: None,
            truth: self.truth,
            faults: Faults::default(),
            seed: 0,
            profiles,
            teams: vec!["all".into()],
            measure: None,
            measuring: Measuring::default(),
            blind: None,
        };
        let arrival = |i: usize| {
            let mut spec = Spec::training(1, work, ProfileIdx::from_usize(i));
            spec.retries = 3.into();
            Arrival { at: Time::ZERO, name: format!("j{i}"), spec, work, requests: None }
        };
        let mut observer = (Recorded::default(), Writer::new(Vec::new()));
        let jobs = (0..self.trainings.len()).map(arrival);
        simulate(setup, jobs, &mut observer, &mut |_| {}).unwrap();
        let journal = String::from_utf8(observer.1.finish().unwrap()).unwrap();
        (observer.0, journal)
    }
}

fn near(a: f64, b: f64) {
    assert!((a - b).abs() < 2e-5 * b.abs().max(1.0), "{a} instead of {b}");
}

#[test]
fn progress_follows_goodput() {
    // A step of any batch size takes a second here: 40 steps at 64, then 256 at a noise scale of
    // 64.
    let training = Training::around(64, 64.0);
    let each = goodput_factor(64.0, 256.0, 64.0);
    // The engine's progress equals the true progress.
    let believed = Some(40.0 + 20.0 * each);
    let (recorded, _) = Case { believed, ..Case::new(vec![training], &[(40.0, 0, 256)]) }.run();
    near(recorded.finished[0].0, 40.0 + 60.0 / each);
    assert_eq!(recorded.tuned[0].batch, 256);
    let last = recorded.samples.last().unwrap().2;
    assert_eq!((last.batch, last.noise_scale.get(), last.step_s.get()), (256, 64.0, 1.0));
}

#[test]
fn growing_noise_raises_the_goodput_of_a_large_batch() {
    let noise = Noise { start: 16.0, end: 4096.0 };
    let training = Training { noise, lr: LrRule::Linear, ..Training::around(64, 0.0) };
    let (recorded, journal) = Case::new(vec![training.clone()], &[(0.0, 0, 256)]).run();
    let stage_s = |s: u32| 5.0 / goodput_factor(64.0, 256.0, f64::from(noise.at(s)));
    near(recorded.finished[0].0, (0..Noise::STAGES).map(stage_s).sum());
    let samples: Vec<f32> = recorded.samples.iter().map(|s| s.2.noise_scale.get()).collect();
    let mut stages: Vec<f32> = (0..Noise::STAGES).map(|s| noise.at(s)).collect();
    stages.dedup();
    let mut sampled = samples;
    sampled.dedup();
    assert_eq!(sampled, stages, "each stage is sampled when it begins");
    // At the job's own batch size the noise has no effect.
    let (own, _) = Case::new(vec![training], &[]).run();
    near(own.finished[0].0, 100.0);
    // The journal reads back equal.
    let mut again = Recorded::default();
    journal::read(journal.as_bytes(), &mut again).unwrap();
    assert_eq!(again.samples, recorded.samples);
}

#[test]
fn the_cost_of_a_change_is_lost() {
    let training = Training::around(64, 64.0);
    let case = Case { tune_s: 7.0, ..Case::new(vec![training], &[(40.0, 0, 256)]) };
    let case = Case { believed: Some(40.0 + 13.0 * goodput_factor(64.0, 256.0, 64.0)), ..case };
    let (recorded, _) = case.run();
    near(recorded.finished[0].0, 47.0 + 60.0 / goodput_factor(64.0, 256.0, 64.0));
}

/// A job of a measured profile.
fn measured(batch: u32, noise: f32) -> Training {
    Training { batch_min: 16, batch_max: 1024, ..Training::around(batch, noise) }
}

#[test]
fn step_times_are_as_measured_alone_and_co_located() {
    let atlas = Arc::new(h200().unwrap());
    let truth = Truth::measured(Arc::clone(&atlas));
    let vit = atlas.task(roommate_core::measurement::rows::TaskKind::Train, "vit-b16-imagenet");
    let step_s = |batch| 1.0 / atlas.steps_per_s(vit.unwrap(), batch);
    let mut case = Case::new(vec![measured(64, 500.0)], &[(10.0, 0, 128), (20.0, 0, 90)]);
    case.names = vec!["vit-b16-imagenet"];
    case.truth = truth.model(&case.profiles()).0;
    let (recorded, _) = case.run();
    let samples: Vec<(u32, f64)> =
        recorded.samples.iter().map(|s| (s.2.batch, s.2.step_s.get())).collect();
    for batch in [64, 128, 90] {
        let (_, sampled_s) = samples.iter().find(|t| t.0 == batch).unwrap();
        near(*sampled_s, step_s(batch) / step_s(64));
    }

    // A larger batch size of the co-located job slows this one.
    let slowed = |other: u32| {
        let trainings = vec![measured(64, 500.0), measured(64, 500.0)];
        let mut case = Case::new(trainings, &[(10.0, 1, other)]);
        case.names = vec!["vit-b16-imagenet", "resnet18-imagenet"];
        case.truth = truth.model(&case.profiles()).0;
        let (recorded, _) = case.run();
        let mine = recorded.samples.iter().filter(|s| s.1 == JobIdx(0) && s.0 >= 10.0);
        mine.map(|s| s.2.step_s).next().unwrap()
    };
    assert!(slowed(512) > slowed(32), "{} {}", slowed(512), slowed(32));
}

#[test]
fn exceeding_gpu_memory_fails_with_out_of_memory() {
    let memory = vec![(64, 6_000), (256, 30_000)];
    let training = Training { memory, ..Training::around(64, 1e6) };
    let case = |mem_mib: u32, batch: u32| Case {
        cluster: "1x1:v100",
        mem_mib,
        ..Case::new(vec![training.clone()], &[(40.0, 0, batch)])
    };
    // 18,000 MiB on a GPU of 16 GiB; the job has no limit of its own.
    let (recorded, _) = case(0, 160).run();
    assert_eq!(recorded.failed, [(40.0, Reason::OutOfMemory)]);
    // The job waits for 5 s and restarts at its own batch size from its last checkpoint, the start.
    near(recorded.finished[0].0, 145.0);
    // Within the GPU's memory, but beyond the job's own limit.
    let (recorded, _) = case(8_000, 96).run();
    assert_eq!(recorded.failed, [(40.0, Reason::OutOfMemory)]);
    let (recorded, _) = case(8_000, 72).run();
    assert_eq!(recorded.failed, []);
    assert_eq!(recorded.samples.last().unwrap().2.mem_mib, 7_000);
}

#[test]
fn the_job_that_exceeds_memory_fails_not_its_neighbour() {
    let heavy = Training { memory: vec![(64, 9_000)], ..Training::around(64, 64.0) };
    let trainings = vec![heavy.clone(), heavy];
    let case = Case { cluster: "1x1:v100", ..Case::new(trainings, &[]) };
    let (recorded, _) = case.run();
    // The failing job is restarted after each pause, as long as its retries allow.
    assert!(
        recorded.failed.iter().all(|f| f.1 == Reason::OutOfMemory) && !recorded.failed.is_empty()
    );
    assert_eq!(recorded.finished[0], (100.0, JobIdx(0)));
}
