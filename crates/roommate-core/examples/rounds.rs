//! Time per policy decision in an oversubscribed cluster: a number of live jobs, then rounds in
//! which one job ends and another arrives. `rounds POLICY CLUSTER JOBS ROUNDS` prints the mean and
//! the longest round.
#![allow(
    clippy::print_stdout,
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a benchmark prints and has a clock"
)]

use roommate_core::engine::Engine;
use roommate_core::event::Event;
use roommate_core::idx::{JobIdx, ProfileIdx};
use roommate_core::interference::Undisturbed;
use roommate_core::job::Spec;
use roommate_core::math::rng::Rng;
use roommate_core::number::Number;
use roommate_core::policy::{self, Params};
use roommate_core::profile::Profile;
use roommate_core::state::Costs;
use roommate_core::testing::confirmation;
use roommate_core::time::{Span, Time};
use std::time::Instant;

/// Stages of eight profiles on one GPU, seconds: storage, CPU, GPU, network.
const STAGES_S: [[f64; 4]; 8] = [
    [0.05, 0.06, 0.07, 0.11],
    [0.05, 0.06, 0.09, 0.12],
    [0.35, 0.33, 0.11, 0.06],
    [0.32, 0.30, 0.06, 0.02],
    [0.001, 0.002, 0.17, 0.08],
    [0.001, 0.002, 0.40, 0.05],
    [0.0, 0.45, 0.02, 0.001],
    [0.0, 0.40, 0.01, 0.001],
];

struct Crowd {
    engine: Engine,
    rng: Rng,
    now: Time,
}

impl Crowd {
    fn job(&mut self) -> JobIdx {
        let gpus = [1, 1, 1, 1, 2, 4, 8, 8][self.rng.below(8) as usize];
        let work = 1_000.0 + self.rng.below(1_000_000) as f64;
        let profile = ProfileIdx(self.rng.below(STAGES_S.len() as u64) as u32);
        self.engine.add_job(Spec::training(gpus, work, profile))
    }

    /// Reports facts to the engine, and confirms its actions until none is left to confirm.
    fn tell(&mut self, mut facts: Vec<Event>) {
        while !facts.is_empty() {
            let step = self.engine.step(self.now, &facts);
            facts = step.actions.iter().filter_map(confirmation).collect();
        }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [name, cluster, jobs, rounds] = words.as_slice() else {
        return Err("usage: rounds POLICY CLUSTER JOBS ROUNDS".into());
    };
    let policy = policy::find(name)?.build(&Params::new())?;
    let cluster = cluster.parse()?;
    let engine = Engine::new(&cluster, Costs::default(), policy, Box::new(Undisturbed), 1);
    let mut crowd = Crowd { engine, rng: Rng::new(1), now: Time::ZERO };
    for stages in STAGES_S {
        let whole = Profile::of_step(stages.iter().sum());
        let profile = Profile { stages_s: Some(stages.map(Number::of)), ..whole };
        crowd.engine.add_profile(profile);
    }
    let live: usize = jobs.parse()?;
    let arrivals = (0..live).map(|_| Event::Submitted(crowd.job())).collect();
    let began = Instant::now();
    crowd.tell(arrivals);
    let first_ms = 1e3 * began.elapsed().as_secs_f64();
    let (mut sum, mut worst) = (0.0, 0.0f64);
    let rounds: u32 = rounds.parse()?;
    for _ in 0..rounds {
        crowd.now += Span::from_secs(60.0);
        let placed = &crowd.engine.state().placed;
        let from = crowd.rng.below(crowd.engine.state().jobs.len() as u64) as usize;
        let ended = placed.first_from(from).or_else(|| placed.first());
        let mut facts: Vec<Event> = ended.map(Event::Finished).into_iter().collect();
        facts.push(Event::Submitted(crowd.job()));
        let began = Instant::now();
        crowd.tell(facts);
        let took = began.elapsed().as_secs_f64();
        sum += took;
        worst = worst.max(took);
    }
    let state = crowd.engine.state();
    let (waiting, running) = (state.pending.len(), state.placed.len());
    let (mean_ms, worst_ms) = (1e3 * sum / f64::from(rounds.max(1)), 1e3 * worst);
    print!("{name}: {running} run, {waiting} wait; first round {first_ms:.1} ms, ");
    println!("then {mean_ms:.2} ms a round, {worst_ms:.2} ms at worst");
    Ok(())
}
