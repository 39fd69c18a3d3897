//! Time per decision where to place a training task: a service on every GPU (`iadeep` and its
//! variants have none), all of them measured, a queue, and then one task that ends and one that
//! arrives at a time, each followed by measurements. `placements POLICY GPUS ROUNDS [TASKS
//! [REPEATS]]` prints percentiles of one decision, with TASKS training tasks per GPU (1); of
//! several repeats of the same run the fastest counts, decision by decision, because the machine is
//! shared.
#![allow(
    clippy::print_stdout,
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a benchmark prints and has a clock"
)]

use roommate_core::engine::Engine;
use roommate_core::event::{Event, Sample};
use roommate_core::idx::{GpuIdx, Idx, JobIdx, ProfileIdx};
use roommate_core::interference::Undisturbed;
use roommate_core::job::{Class, Slo, Spec};
use roommate_core::math::rng::Rng;
use roommate_core::number::{Number, Number32};
use roommate_core::performance::goodput::{LrRule, Noise, Training};
use roommate_core::policy::{self, Params};
use roommate_core::profile::{Predicted, Profile, Profiled, Serving};
use roommate_core::state::Costs;
use roommate_core::testing::confirmation;
use roommate_core::time::{Span, Time};
use std::error::Error;
use std::time::Instant;

/// Services: SLO in ms, and milliseconds of work per request on the whole GPU.
const SERVICES: [(u32, f64); 6] =
    [(150, 0.4), (120, 0.6), (100, 0.3), (330, 0.5), (110, 0.3), (2200, 1.5)];
/// Training tasks: busy shares of SMs and memory bandwidth.
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

/// Seconds per batch alone.
fn batch_s(service: usize, batch: u32, share: f64) -> f64 {
    let most = (0.1 + 0.02 * f64::from(batch)).min(1.0);
    0.003 + SERVICES[service].1 / 1e3 * f64::from(batch) / share.min(most)
}

fn service(service: usize) -> Profile {
    let point = |batch: u32, sm_permille: u16| {
        let seconds = batch_s(service, batch, f64::from(sm_permille) / 1e3);
        Profiled { batch, sm_permille, seconds }
    };
    let shares = [60, 120, 180, 300, 480, 730, 1000];
    let points = [1, 4, 16, 64].into_iter().flat_map(|b| shares.map(|s| point(b, s)));
    let mut profile = Profile::of_step(batch_s(service, 16, 1.0));
    profile.latency = Some(points.collect());
    profile.serving = Some(Serving {
        batch: 16,
        timeout: Span::from_secs(f64::from(SERVICES[service].0) / 1e4),
        warm_up: Span::ZERO,
        base_mib: 0.0,
        item_mib: 0.0,
    });
    profile
}

fn training((sm, dram): (f64, f64)) -> Profile {
    let predicted =
        Predicted { sm_util: sm, sm_util_max: sm, std: 0.0, dram_util: dram, mem_mib: 0 };
    let (lr, noise) = (LrRule::default(), Noise { start: 1e3, end: 1e3 });
    let training =
        Training { batch: 64, batch_min: 16, batch_max: 512, lr, noise, memory: Vec::new() };
    Profile { predicted: Some(predicted), training: Some(training), ..Profile::of_step(0.1) }
}

struct Crowd {
    engine: Engine,
    rng: Rng,
    now: Time,
    wake: Option<Time>,
    /// Seconds of each decision.
    took: Vec<f64>,
    /// Training tasks whose conditions changed since they were last measured.
    unmeasured: Vec<JobIdx>,
}

impl Crowd {
    fn task(&mut self) -> JobIdx {
        let task = self.rng.below(TRAININGS.len() as u64) as usize;
        let profile = ProfileIdx((SERVICES.len() + task) as u32);
        self.engine.add_job(Spec::training(1, 1e9, profile))
    }

    /// One step, timed, and the confirmations of its actions.
    fn tell(&mut self, facts: &[Event]) {
        let began = Instant::now();
        let step = self.engine.step(self.now, facts);
        let took = began.elapsed().as_secs_f64();
        if step.asked {
            self.took.push(took);
        }
        self.wake = step.wake;
        let facts: Vec<Event> = step.actions.iter().filter_map(confirmation).collect();
        if facts.is_empty() {
            return;
        }
        self.wake = self.engine.step(self.now, &facts).wake.or(self.wake);
        let state = self.engine.state();
        for fact in &facts {
            if let Event::Started(job) | Event::Tuned(job) = fact {
                let roommates = state.job(*job).gpus.iter().flat_map(|g| &state.gpu(*g).tenants);
                let training = |j: &&JobIdx| state.spec(**j).class != Class::Service;
                self.unmeasured.extend(roommates.filter(training));
            }
        }
    }

    /// Samples of training tasks whose conditions changed.
    fn paces(&mut self) -> Vec<Event> {
        let mut jobs = std::mem::take(&mut self.unmeasured);
        jobs.sort_unstable();
        jobs.dedup();
        let state = self.engine.state();
        jobs.retain(|j| state.job(*j).is_placed());
        let pace = |job: JobIdx| {
            let task = state.spec(job).profile.usize() - SERVICES.len();
            let knobs = state.job(job).knobs;
            let batch = if knobs.batch == 0 { 64 } else { knobs.batch };
            let others = state.gpu(state.job(job).gpus[0]).tenants.iter().filter(|t| **t != job);
            let busy = |t: &JobIdx| state.profile(*t).predicted.map_or(0.0, |p| p.sm_util);
            let (sm, dram) = TRAININGS[task];
            let slower = 1.0 + sm * others.map(busy).sum::<f64>();
            let sample = Sample {
                step_s: Number::of(0.1 * (0.3 + 0.7 * f64::from(batch) / 64.0) * slower),
                batch,
                noise_scale: Number32::of(1e3),
                sm_util: Number32::of(sm as f32),
                dram_util: Number32::of(dram as f32),
                ..Sample::default()
            };
            Event::Sampled { job, sample }
        };
        jobs.into_iter().map(pace).collect()
    }

    /// A window of a service, as its world would measure it.
    fn sample(&mut self, job: JobIdx) -> Event {
        let state = self.engine.state();
        let (knobs, service) = (state.job(job).knobs, state.spec(job).profile.0 as usize);
        let batch = if knobs.batch == 0 { 16 } else { knobs.batch };
        let crowd = state.gpu(state.job(job).gpus[0]).tenants.len() as f64 - 1.0;
        let noise = 1.0 + 0.05 * self.rng.unit();
        let sample = Sample {
            step_s: Number::of(
                batch_s(service, batch, knobs.reach()) * (1.0 + 0.2 * crowd) * noise,
            ),
            p99_us: SERVICES[service].0 * 500,
            load_rps: Number32::of(150.0 + 100.0 * self.rng.unit() as f32),
            ..Sample::default()
        };
        Event::Sampled { job, sample }
    }

    fn wait(&mut self, span_s: f64) {
        let until = self.now + Span::from_secs(span_s);
        while let Some(wake) = self.wake.filter(|w| *w <= until) {
            self.now = wake;
            let paces = self.paces();
            self.tell(&paces);
        }
        self.now = until;
    }
}

/// Seconds of each decision to place a task, and of each after a measurement; and the number of
/// running tasks.
type Times = (Vec<f64>, Vec<f64>, usize);

fn play(name: &str, gpus: u32, rounds: u32, tasks: u32) -> Result<Times, Box<dyn Error>> {
    let policy = policy::find(name)?.build(&Params::new())?;
    let cluster = format!("{gpus}x1").parse()?;
    let engine = Engine::new(&cluster, Costs::default(), policy, Box::new(Undisturbed), 1);
    let (rng, took, unmeasured) = (Rng::new(1), Vec::new(), Vec::new());
    let mut crowd = Crowd { engine, rng, now: Time::ZERO, wake: None, took, unmeasured };
    (0..SERVICES.len()).for_each(|i| {
        crowd.engine.add_profile(service(i));
    });
    for demand in TRAININGS {
        crowd.engine.add_profile(training(demand));
    }
    let with_services = if name.starts_with("iadeep") { 0 } else { gpus };
    let services: Vec<JobIdx> = (0..with_services)
        .map(|i| {
            let service = i as usize % SERVICES.len();
            let slo = Some(Slo { p99_us: SERVICES[service].0 * 1000 });
            let spec = Spec::training(1, 1.0, ProfileIdx(service as u32));
            crowd.engine.add_job(Spec { class: Class::Service, work: None, slo, ..spec })
        })
        .collect();
    crowd.tell(&services.iter().map(|job| Event::Submitted(*job)).collect::<Vec<_>>());
    crowd.now += Span::from_secs(10.0);
    let samples: Vec<Event> = services.iter().map(|job| crowd.sample(*job)).collect();
    crowd.tell(&samples);
    let queue: Vec<Event> =
        (0..tasks * gpus + 50).map(|_| Event::Submitted(crowd.task())).collect();
    crowd.now += Span::from_secs(10.0);
    crowd.tell(&queue);
    crowd.wait(600.0);
    let (mut placing, mut measuring) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        // Events that are due by then are not part of the decision.
        crowd.wait(1.0);
        crowd.took.clear();
        let gpu = GpuIdx(crowd.rng.below(u64::from(gpus)) as u32);
        let state = crowd.engine.state();
        let training = |j: &&JobIdx| state.spec(**j).class != Class::Service;
        let finished = state.gpu(gpu).tenants.iter().find(training).copied();
        let mut facts: Vec<Event> = finished.map(Event::Finished).into_iter().collect();
        facts.push(Event::Submitted(crowd.task()));
        crowd.tell(&facts);
        placing.append(&mut crowd.took);
        crowd.now += Span::from_secs(1.0);
        if !services.is_empty() {
            let service = services[crowd.rng.below(u64::from(gpus)) as usize];
            let sample = crowd.sample(service);
            crowd.tell(&[sample]);
        }
        crowd.wait(10.0);
        measuring.append(&mut crowd.took);
    }
    Ok((placing, measuring, crowd.engine.state().placed.len()))
}

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let ([name, gpus, rounds], more) = words.split_at(words.len().min(3)) else {
        return Err("usage: placements POLICY GPUS ROUNDS [TASKS [REPEATS]]".into());
    };
    let (gpus, rounds): (u32, u32) = (gpus.parse()?, rounds.parse()?);
    let number = |i: usize| more.get(i).map_or(Ok(1), |word| word.parse::<u32>());
    let (tasks, repeats) = (number(0)?, number(1)?);
    let (mut placing, mut measuring, placed) = play(name, gpus, rounds, tasks)?;
    for _ in 1..repeats {
        let (p, m, _) = play(name, gpus, rounds, tasks)?;
        for (best, took) in [(&mut placing, p), (&mut measuring, m)] {
            best.iter_mut().zip(took).for_each(|(best, took)| *best = best.min(took));
        }
    }
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
