//! How long a policy with services takes to decide where a training task goes: a service on every GPU,
//! all of them measured, a queue, and then one task that ends and one that arrives at a time, each followed
//! by measurements. `placements POLICY GPUS ROUNDS` prints percentiles of one decision.
#![allow(
    clippy::print_stdout,
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a benchmark prints and has a clock"
)]

use roommate_core::engine::Engine;
use roommate_core::event::{Action, Event, Sample};
use roommate_core::idx::{JobIdx, ProfileIdx};
use roommate_core::interference::Undisturbed;
use roommate_core::job::{Class, Slo, Spec};
use roommate_core::latency::Profiled;
use roommate_core::math::rng::Rng;
use roommate_core::policy::{self, Params};
use roommate_core::profile::{Predicted, Profile, Serving};
use roommate_core::state::Costs;
use roommate_core::time::{Span, Time};
use std::time::Instant;

/// Kinds of services: objective in ms, and milliseconds of work for each request on the whole GPU.
const SERVICES: [(u32, f64); 6] =
    [(150, 0.4), (120, 0.6), (100, 0.3), (330, 0.5), (110, 0.3), (2200, 1.5)];
/// Kinds of training: busy multiprocessors and memory bandwidth.
const TRAININGS: [(f64, f64); 9] = [
    (0.9, 0.5),
    (0.3, 0.1),
    (0.8, 0.4),
    (0.2, 0.2),
    (0.6, 0.3),
    (0.5, 0.5),
    (0.7, 0.2),
    (0.4, 0.3),
    (0.9, 0.3),
];

/// Seconds of a batch alone.
fn batch_s(kind: usize, batch: u32, share: f64) -> f64 {
    let most = (0.1 + 0.02 * f64::from(batch)).min(1.0);
    0.003 + SERVICES[kind].1 / 1e3 * f64::from(batch) / share.min(most)
}

fn service(kind: usize) -> Profile {
    let point = |batch: u32, sm_permille: u16| {
        let seconds = batch_s(kind, batch, f64::from(sm_permille) / 1e3);
        Profiled { batch, sm_permille, seconds }
    };
    let shares = [60, 120, 180, 300, 480, 730, 1000];
    let points = [1, 4, 16, 64].into_iter().flat_map(|b| shares.map(|s| point(b, s)));
    let mut profile = Profile::of_step(batch_s(kind, 16, 1.0));
    profile.latency = Some(points.collect());
    profile.serving = Some(Serving {
        batch: 16,
        timeout: Span::from_secs(f64::from(SERVICES[kind].0) / 1e4),
        warm_up: Span::ZERO,
        base_mib: 0.0,
        item_mib: 0.0,
    });
    profile
}

fn training((sm, dram): (f64, f64)) -> Profile {
    let predicted =
        Predicted { sm_util: sm, sm_util_max: sm, std: 0.0, dram_util: dram, mem_mib: 0 };
    Profile { predicted: Some(predicted), ..Profile::of_step(0.1) }
}

struct Crowd {
    engine: Engine,
    rng: Rng,
    now: Time,
    wake: Option<Time>,
    /// Seconds of each decision.
    took: Vec<f64>,
}

impl Crowd {
    fn task(&mut self) -> JobIdx {
        let kind = self.rng.below(TRAININGS.len() as u64) as usize;
        let profile = ProfileIdx((SERVICES.len() + kind) as u32);
        self.engine.add_job(Spec::training(1, 1e9, profile))
    }

    /// One step, timed, and confirmations of what it asks for.
    fn tell(&mut self, facts: &[Event]) {
        let began = Instant::now();
        let step = self.engine.step(self.now, facts);
        let took = began.elapsed().as_secs_f64();
        if step.asked {
            self.took.push(took);
        }
        self.wake = step.wake;
        let confirm = |a: &Action| match a {
            Action::Start(job, _) | Action::Move(job, _) => Some(Event::Started(*job)),
            Action::Stop(job) | Action::Suspend(job) => {
                Some(Event::Stopped { job: *job, done: 0.0 })
            }
            Action::Tune(job, _) => Some(Event::Tuned(*job)),
            Action::Reject(..) => None,
        };
        let facts: Vec<Event> = step.actions.iter().filter_map(confirm).collect();
        if !facts.is_empty() {
            let actions = facts.clone();
            self.engine.step(self.now, &actions);
        }
    }

    /// A window of a service, as its world would measure it.
    fn sample(&mut self, job: JobIdx) -> Event {
        let state = self.engine.state();
        let (knobs, kind) = (state.job(job).knobs, state.spec(job).profile.0 as usize);
        let batch = if knobs.batch == 0 { 16 } else { knobs.batch };
        let crowd = state.gpu(state.job(job).gpus[0]).tenants.len() as f64 - 1.0;
        let noise = 1.0 + 0.05 * self.rng.unit();
        let sample = Sample {
            step_s: batch_s(kind, batch, knobs.reach()) * (1.0 + 0.2 * crowd) * noise,
            p99_us: SERVICES[kind].0 * 500,
            load_rps: 150.0 + 100.0 * self.rng.unit() as f32,
            ..Sample::default()
        };
        Event::Sampled { job, sample }
    }

    fn wait(&mut self, span_s: f64) {
        let until = self.now + Span::from_secs(span_s);
        while let Some(wake) = self.wake.filter(|w| *w <= until) {
            self.now = wake;
            self.tell(&[]);
        }
        self.now = until;
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [name, gpus, rounds] = words.as_slice() else {
        return Err("usage: placements POLICY GPUS ROUNDS".into());
    };
    let policy = policy::find(name)?.build(&Params::new())?;
    let (gpus, rounds): (u32, u32) = (gpus.parse()?, rounds.parse()?);
    let cluster = format!("{gpus}x1").parse()?;
    let engine = Engine::new(&cluster, Costs::default(), policy, Box::new(Undisturbed), 1);
    let rng = Rng::new(1);
    let mut crowd = Crowd { engine, rng, now: Time::ZERO, wake: None, took: Vec::new() };
    (0..SERVICES.len()).for_each(|kind| {
        crowd.engine.add_profile(service(kind));
    });
    for kind in TRAININGS {
        crowd.engine.add_profile(training(kind));
    }
    let services: Vec<JobIdx> = (0..gpus)
        .map(|i| {
            let kind = i as usize % SERVICES.len();
            let slo = Some(Slo { p99_us: SERVICES[kind].0 * 1000 });
            let spec = Spec::training(1, 1.0, ProfileIdx(kind as u32));
            crowd.engine.add_job(Spec { class: Class::Service, work: None, slo, ..spec })
        })
        .collect();
    crowd.tell(&services.iter().map(|job| Event::Submitted(*job)).collect::<Vec<_>>());
    crowd.now += Span::from_secs(10.0);
    let samples: Vec<Event> = services.iter().map(|job| crowd.sample(*job)).collect();
    crowd.tell(&samples);
    let queue: Vec<Event> = (0..gpus + 50).map(|_| Event::Submitted(crowd.task())).collect();
    crowd.now += Span::from_secs(10.0);
    crowd.tell(&queue);
    crowd.wait(600.0);
    let (mut placing, mut measuring) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        crowd.took.clear();
        let state = crowd.engine.state();
        let room =
            state.gpu(state.job(services[crowd.rng.below(u64::from(gpus)) as usize]).gpus[0]);
        let training = |j: &&JobIdx| state.spec(**j).class != Class::Service;
        let lodger = room.tenants.iter().find(training).copied();
        let mut facts: Vec<Event> = lodger.map(Event::Finished).into_iter().collect();
        facts.push(Event::Submitted(crowd.task()));
        crowd.now += Span::from_secs(1.0);
        crowd.tell(&facts);
        placing.append(&mut crowd.took);
        let service = services[crowd.rng.below(u64::from(gpus)) as usize];
        crowd.now += Span::from_secs(1.0);
        let sample = crowd.sample(service);
        crowd.tell(&[sample]);
        crowd.wait(10.0);
        measuring.append(&mut crowd.took);
    }
    let placed = crowd.engine.state().placed.len();
    print!("{name}: {placed} run on {gpus} GPUs");
    for (what, mut took) in [("placing", placing), ("after a measurement", measuring)] {
        took.sort_by(f64::total_cmp);
        let at = |q: f64| 1e3 * took[((q * took.len() as f64) as usize).min(took.len() - 1)];
        let (mean, p99, worst) =
            (1e3 * took.iter().sum::<f64>() / took.len() as f64, at(0.99), at(1.0));
        print!("; {what}: mean {mean:.3} ms, p99 {p99:.3} ms, worst {worst:.3} ms");
    }
    println!();
    Ok(())
}
