//! Batch sizes that change under way: steps as measured, progress by goodput, memory that runs out.
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

/// Starts everybody on the first GPU at its own batch size, and tunes as told: when, whom, to which batch.
struct Script {
    turns: Vec<(f64, u32, u32)>,
    mem_mib: u32,
    /// Steps that the first job is believed to have done at 60 s.
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

/// What happened.
#[derive(Default)]
struct Heard {
    finished: Vec<(f64, JobIdx)>,
    failed: Vec<(f64, Reason)>,
    samples: Vec<(f64, JobIdx, Sample)>,
    tuned: Vec<Knobs>,
}

impl Observer for Heard {
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

    fn run(self) -> (Heard, String) {
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
        };
        let arrival = |i: usize| {
            let mut spec = Spec::training(1, work, ProfileIdx::from_usize(i));
            spec.retries = 3.into();
            Arrival { at: Time::ZERO, name: format!("j{i}"), spec, work, requests: None }
        };
        let mut observer = (Heard::default(), Writer::new(Vec::new()));
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
    // Steps of any batch take a second here. 40 steps at 64, then batch 256 at a noise scale of 64.
    let training = Training::around(64, 64.0);
    let each = goodput_factor(64.0, 256.0, 64.0);
    // The engine believes what is true.
    let believed = Some(40.0 + 20.0 * each);
    let (heard, _) = Case { believed, ..Case::new(vec![training], &[(40.0, 0, 256)]) }.run();
    near(heard.finished[0].0, 40.0 + 60.0 / each);
    assert_eq!(heard.tuned[0].batch, 256);
    let last = heard.samples.last().unwrap().2;
    assert_eq!((last.batch, last.noise_scale, last.step_s), (256, 64.0, 1.0));
}

#[test]
fn noise_that_grows_makes_a_large_batch_worth_more_and_more() {
    let noise = Noise { start: 16.0, end: 4096.0 };
    let training = Training { noise, lr: LrRule::Linear, ..Training::around(64, 0.0) };
    let (heard, journal) = Case::new(vec![training.clone()], &[(0.0, 0, 256)]).run();
    let stage_s = |s: u32| 5.0 / goodput_factor(64.0, 256.0, f64::from(noise.at(s)));
    near(heard.finished[0].0, (0..Noise::STAGES).map(stage_s).sum());
    let told: Vec<f32> = heard.samples.iter().map(|s| s.2.noise_scale).collect();
    let mut stages: Vec<f32> = (0..Noise::STAGES).map(|s| noise.at(s)).collect();
    stages.dedup();
    let mut heard_of = told;
    heard_of.dedup();
    assert_eq!(heard_of, stages, "each stage is measured once it begins");
    // At the job's own batch the noise does not matter.
    let (own, _) = Case::new(vec![training], &[]).run();
    near(own.finished[0].0, 100.0);
    // And what is written can be read.
    let mut again = Heard::default();
    journal::read(journal.as_bytes(), &mut again).unwrap();
    assert_eq!(again.samples, heard.samples);
}

#[test]
fn what_a_change_costs_is_lost() {
    let training = Training::around(64, 64.0);
    let case = Case { tune_s: 7.0, ..Case::new(vec![training], &[(40.0, 0, 256)]) };
    let case = Case { believed: Some(40.0 + 13.0 * goodput_factor(64.0, 256.0, 64.0)), ..case };
    let (heard, _) = case.run();
    near(heard.finished[0].0, 47.0 + 60.0 / goodput_factor(64.0, 256.0, 64.0));
}

/// A job of a measured task.
fn measured(batch: u32, noise: f32) -> Training {
    Training { batch_min: 16, batch_max: 1024, ..Training::around(batch, noise) }
}

#[test]
fn steps_take_what_was_measured_alone_and_beside_others() {
    let atlas = Arc::new(h200().unwrap());
    let truth = Truth::measured(Arc::clone(&atlas));
    let vit = atlas.task(roommate_core::measurement::rows::TaskKind::Train, "vit-b16-imagenet");
    let step_s = |batch| 1.0 / atlas.steps_per_s(vit.unwrap(), batch);
    let mut case = Case::new(vec![measured(64, 500.0)], &[(10.0, 0, 128), (20.0, 0, 90)]);
    case.names = vec!["vit-b16-imagenet"];
    case.truth = truth.model(&case.profiles()).0;
    let (heard, _) = case.run();
    let told: Vec<(u32, f64)> = heard.samples.iter().map(|s| (s.2.batch, s.2.step_s)).collect();
    for batch in [64, 128, 90] {
        let (_, told_s) = told.iter().find(|t| t.0 == batch).unwrap();
        near(*told_s, step_s(batch) / step_s(64));
    }

    // A roommate's batch is felt.
    let slowed = |other: u32| {
        let trainings = vec![measured(64, 500.0), measured(64, 500.0)];
        let mut case = Case::new(trainings, &[(10.0, 1, other)]);
        case.names = vec!["vit-b16-imagenet", "resnet18-imagenet"];
        case.truth = truth.model(&case.profiles()).0;
        let (heard, _) = case.run();
        let mine = heard.samples.iter().filter(|s| s.1 == JobIdx(0) && s.0 >= 10.0);
        mine.map(|s| s.2.step_s).next().unwrap()
    };
    assert!(slowed(512) > slowed(32), "{} {}", slowed(512), slowed(32));
}

#[test]
fn who_takes_more_memory_than_there_is_fails_and_says_so() {
    let memory = vec![(64, 6_000), (256, 30_000)];
    let training = Training { memory, ..Training::around(64, 1e6) };
    let case = |mem_mib: u32, batch: u32| Case {
        cluster: "1x1:v100",
        mem_mib,
        ..Case::new(vec![training.clone()], &[(40.0, 0, batch)])
    };
    // 18,000 MiB on a GPU of 16 GiB; without a limit of its own.
    let (heard, _) = case(0, 160).run();
    assert_eq!(heard.failed, [(40.0, Reason::OutOfMemory)]);
    // It waits for 5 s and starts again at its own batch, from its last checkpoint: the very start.
    near(heard.finished[0].0, 145.0);
    // Within the GPU, but beyond its own limit.
    let (heard, _) = case(8_000, 96).run();
    assert_eq!(heard.failed, [(40.0, Reason::OutOfMemory)]);
    let (heard, _) = case(8_000, 72).run();
    assert_eq!(heard.failed, []);
    assert_eq!(heard.samples.last().unwrap().2.mem_mib, 7_000);
}

#[test]
fn the_last_straw_fails_and_not_its_roommate() {
    let heavy = Training { memory: vec![(64, 9_000)], ..Training::around(64, 64.0) };
    let trainings = vec![heavy.clone(), heavy];
    let case = Case { cluster: "1x1:v100", ..Case::new(trainings, &[]) };
    let (heard, _) = case.run();
    // The other comes back after each pause, as long as its retries allow.
    assert!(heard.failed.iter().all(|f| f.1 == Reason::OutOfMemory) && !heard.failed.is_empty());
    assert_eq!(heard.finished[0], (100.0, JobIdx(0)));
}
