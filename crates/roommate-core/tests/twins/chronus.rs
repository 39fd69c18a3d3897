//! Promises of `chronus`, seen from outside: they are kept, leases are renewed in place, and without
//! deadlines what is left is shortest remaining service first.

use crate::fold;
use roommate_core::event::{Action, Event};
use roommate_core::idx::{Idx, JobIdx};
use roommate_core::journal::{Observer, StepView};
use roommate_core::math::rng::Rng;
use roommate_core::policy::Params;
use roommate_core::reason::Why;
use roommate_core::testing::Scene;
use roommate_core::time::Time;
use serde_json::{Value, json};

fn params(object: &Value) -> Params {
    object.as_object().unwrap().clone()
}

/// What was promised to whom, when each finished, and how often each was started.
#[derive(Default)]
struct Seen {
    promised: Vec<(JobIdx, Time)>,
    finished: Vec<(JobIdx, Time)>,
    starts: Vec<JobIdx>,
    broken: bool,
}

impl Observer for Seen {
    fn step(&mut self, step: &StepView<'_>) {
        for note in step.notes {
            match note.why {
                Why::Promised { by } => self.promised.push((note.job, by)),
                Why::PastEstimate | Why::DeadlineLost => {
                    self.broken |= self.promised.iter().any(|p| p.0 == note.job);
                }
                _ => {}
            }
        }
        for fact in step.facts {
            if let Event::Finished(job) = fact {
                self.finished.push((*job, step.at));
            }
        }
        for action in step.actions {
            if let Action::Start(job, _) | Action::Move(job, _) = action {
                self.starts.push(*job);
            }
        }
    }
}

#[test]
fn a_lease_that_is_renewed_is_not_interrupted() {
    let mut scene = Scene::new("chronus", "1x1", "s 0 1 6, b 0 1 1, c 2 1 1");
    scene.actors[0].spec.deadline = Some(Time::from_secs(6.0));
    scene.params = params(&json!({"lease_s": 1, "slot_s": 1, "safety": 1.0}));
    let outcome = scene.run();
    assert_eq!(fold(&outcome, Seen::default()).starts.iter().filter(|j| j.usize() == 0).count(), 1);
    assert_eq!(outcome.finished, [Some(6), Some(7), Some(8)]);
}

/// Jobs of exact length on equal nodes, some with deadlines.
fn random(seed: u64, deadlines: bool) -> Scene {
    let mut rng = Rng::stream(seed, 1);
    let cluster = ["1x2", "2x4", "1x8", "3x2"][rng.below(4) as usize];
    let mut scene = Scene::new("chronus", cluster, "x 0 1 1");
    let model = scene.actors.pop().unwrap();
    let mut submit = 0;
    for i in 0..3 + rng.below(12) {
        submit += rng.below(4);
        let mut actor = model.clone();
        actor.name = format!("j{i}");
        actor.submit = submit;
        let gpus = 1 + rng.below(u64::from(scene.cluster.gpus())) as u16;
        (actor.spec.gpus, actor.spec.gpus_max) = (gpus, gpus);
        actor.work = (1 + rng.below(9)) as f64;
        actor.spec.work = Some(actor.work);
        if deadlines && rng.chance(0.6) {
            let due = submit + actor.work as u64 + rng.below(20);
            actor.spec.deadline = Some(Time::from_secs(due as f64));
            if rng.chance(0.3) {
                let last = Time::from_secs((due + 5) as f64);
                actor.spec.worth = vec![(Time::from_secs(due as f64), 10.0), (last, 5.0)];
                actor.spec.deadline = Some(last);
            }
        }
        scene.actors.push(actor);
    }
    let slots = 1 + rng.below(3);
    let sign = ["adaptive", "plus", "minus"][rng.below(3) as usize];
    scene.params = params(&json!({
        "slot_s": 1, "lease_s": slots, "safety": 1.0, "sign": sign,
        "short_s": if rng.chance(0.5) { 0 } else { 1_800 },
    }));
    scene
}

#[test]
fn with_exact_estimates_every_promise_is_kept() {
    let mut promises = 0;
    for seed in 0..400 {
        let scene = random(seed, true);
        let seen = fold(&scene.run(), Seen::default());
        assert!(!seen.broken, "seed {seed}");
        for (job, _) in &seen.promised {
            let (_, at) = seen.finished.iter().find(|f| f.0 == *job).unwrap();
            let deadline = scene.actors[job.usize()].spec.deadline.unwrap();
            assert!(*at <= deadline, "seed {seed}: {job} at {at}, due {deadline}");
            promises += 1;
        }
    }
    assert!(promises > 500, "only {promises} promises");
}

#[test]
fn without_deadlines_and_with_leases_of_one_tick_it_is_srsf() {
    for seed in 0..200 {
        let mut scene = random(seed, false);
        scene.params = params(&json!({"lease_s": 1, "slot_s": 1, "safety": 1.0, "rule": "count"}));
        let own = scene.run();
        scene.policy = "srsf".into();
        scene.params = params(&json!({"rule": "count"}));
        assert_eq!(own.finished, scene.run().finished, "seed {seed}");
    }
}
