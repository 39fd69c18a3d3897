//! Days of operation with faults, over all policies and both kinds of devices.
//!
//! `ROOMMATE_TWIN_DAYS` sets how many days are simulated in all, `ROOMMATE_TWIN_SEED` the first
//! seed. Each case prints its seed when it fails, and `ROOMMATE_TWIN_SEED=… ROOMMATE_TWIN_CASES=1`
//! repeats it.

use crate::api::control::Request;
use crate::device::Kind;
use crate::twin::processes::Script;
use crate::twin::world::{Counts, World};
use roommate_core::policy::{self, Entry};

const SECOND: u64 = 1_000_000;
const HOUR: u64 = 3_600 * SECOND;
const DAY: u64 = 24 * HOUR;
/// Days of each case.
const DAYS: u64 = 5;

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(otherwise)
}

/// Something happens.
fn happen(world: &mut World) {
    let weights = [4.0, 1.0, 0.7, 0.7, 0.7, 1.5, 0.6, 0.5, 0.4, 0.3, 0.3, 0.5, 0.6, 1.0];
    let what = world.rng.weighted(&weights);
    world.happened.push(format!("{what} at {} s", world.clock.us() / SECOND));
    match what {
        0 => {
            let rng = &mut world.rng;
            let script = Script {
                seconds: 5.0 + rng.exp(300.0),
                code: i32::from(rng.chance(0.2)),
                stubborn: rng.chance(0.1),
                leaves: rng.chance(0.2),
                sdk: rng.chance(0.5),
            };
            let class = if rng.chance(0.4) { "best-effort" } else { "guaranteed" };
            let share = [1.0, 0.5, 0.25][rng.below(3) as usize];
            world.submit(&script, class, share);
        }
        1 => {
            if let Some(job) = world.some_job() {
                world.ask(Request::Cancel { job });
            }
        }
        2 => {
            if let Some(job) = world.some_job() {
                world.ask(Request::Suspend { job });
            }
        }
        3 => {
            if let Some(job) = world.some_job() {
                world.ask(Request::Resume { job });
            }
        }
        4 => {
            if let Some(job) = world.some_job() {
                let share = serde_json::from_value(serde_json::json!(world.rng.unit())).ok();
                world.ask(Request::Resize { job, batch: None, share });
            }
        }
        5 => {
            let calls = world.rng.below(60);
            world.kill_daemon(calls);
        }
        6 => world.down(),
        7 => world.lose_power(),
        8 => world.flip_bit(),
        9 => {
            world.set_full(true);
            let until = world.clock.us() + 60 * SECOND;
            world.run_until(until);
            world.set_full(false);
        }
        10 => {
            world.set_exhausted(true);
            let until = world.clock.us() + 60 * SECOND;
            world.run_until(until);
            world.set_exhausted(false);
        }
        11 => {
            world.counts.clock_jumps += 1;
            let off = 1_000_000_000_000_000 + world.rng.below(2_000_000_000_000_000);
            world.clock.jump(off);
        }
        12 => world.kill_some_supervisor(),
        _ => world.ask(Request::Ps {}),
    }
    if !world.is_up() && world.rng.chance(0.7) {
        world.up();
    }
}

/// Some days of one daemon, and then peace until all jobs have ended.
fn live(seed: u64, policy: &Entry, kind: Kind, has_groups: bool) -> Result<Counts, String> {
    let mut world = World::new(seed, policy.name, kind, has_groups);
    world.up();
    let bad = |world: &World| match world.broken.first() {
        Some(what) => {
            let last = world.happened.iter().rev().take(10).cloned().collect::<Vec<_>>();
            Err(format!("{what} (at {} s, after {last:?})", world.clock.us() / SECOND))
        }
        None => Ok(()),
    };
    for day in 0..DAYS {
        let mut busy = day * DAY + world.rng.below(12 * HOUR);
        // A burst of things within two hours; the rest of the day is quiet.
        for _ in 0..30 {
            busy += world.rng.below(4 * 60 * SECOND);
            world.run_until(busy);
            happen(&mut world);
            bad(&world)?;
        }
        world.run_until((day + 1) * DAY);
        world.up();
        world.check();
        bad(&world)?;
    }
    // Without faults every job ends: nobody waits for a stranger for ever.
    world.up();
    for _ in 0..200 {
        world.up();
        while let Some(job) = world.held_job() {
            world.ask(Request::Resume { job });
            world.run_until(world.clock.us() + SECOND);
        }
        world.run_until(world.clock.us() + HOUR);
        world.check();
        bad(&world)?;
        if world.unended().is_empty() {
            return Ok(world.counts.clone());
        }
    }
    let jobs = world.jobs().unwrap_or_default();
    let left = jobs.into_iter().filter(|j| !j.ended).map(|j| {
        let how = (j.name, j.state, j.pace, j.cooperative, j.keeper_pid, j.exit, j.why);
        format!("{how:?}")
    });
    Err(format!("jobs never end: {:?}", left.collect::<Vec<_>>()))
}

#[test]
fn nothing_is_lost_or_doubled_in_days_of_faults() {
    let days = number("ROOMMATE_TWIN_DAYS", 600);
    let first = number("ROOMMATE_TWIN_SEED", 1);
    let cases = number("ROOMMATE_TWIN_CASES", days.div_ceil(DAYS));
    let policies: Vec<&Entry> = policy::POLICIES.iter().collect();
    let mut sum = Counts::default();
    let mut failures = Vec::new();
    for seed in first..first + cases {
        let policy = policies[seed as usize % policies.len()];
        let kind =
            if (seed / policies.len() as u64).is_multiple_of(2) { Kind::Cpu } else { Kind::Cuda };
        match live(seed, policy, kind, seed % 3 != 0) {
            Ok(counts) => sum.add(&counts),
            Err(what) => failures.push(format!("seed {seed}, {}, {kind:?}: {what}", policy.name)),
        }
    }
    assert!(failures.is_empty(), "{} of {cases} cases:\n{}", failures.len(), failures.join("\n"));
    if std::env::var_os("ROOMMATE_TWIN_DAYS").is_some() {
        let said = format!("{} daemon-days, no case failed: {sum:?}\n", cases * DAYS);
        std::fs::write(std::env::temp_dir().join("roommate-twin.txt"), said).unwrap();
    }
}
