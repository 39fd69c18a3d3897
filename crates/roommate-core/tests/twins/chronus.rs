//! Guarantees of `chronus`, observed from outside: deadlines are met, leases are renewed in place,
//! and without deadlines the policy is shortest remaining service first.

use crate::fold;
use roommate_core::event::{Action, Event};
use roommate_core::idx::JobIdx;
use roommate_core::journal::{Observer, StepView};
use roommate_core::math::rng::Rng;
use roommate_core::number::Number;
use roommate_core::policy::Params;
use roommate_core::reason::Reason;
use roommate_core::testing::TestCase;
use roommate_core::time::Time;
use serde_json::{Value, json};

fn params(object: &Value) -> Params {
    object.as_object().unwrap().clone()
}

/// Guaranteed deadlines, finishing times and numbers of starts, by job.
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
            match note.reason {
                Reason::Promised { by } => self.promised.push((note.job, by)),
                Reason::PastEstimate | Reason::DeadlineLost => {
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
    let mut case = TestCase::new("chronus", "1x1", "s 0 1 6, b 0 1 1, c 2 1 1");
    case.jobs[0].spec.deadline = Some(Time::from_secs(6.0));
    case.params = params(&json!({"lease_s": 1, "slot_s": 1, "safety": 1.0}));
    let outcome = case.run();
    assert_eq!(
        fold(&outcome, Seen::default()).starts.iter().filter(|j| **j == JobIdx(0)).count(),
        1
    );
    assert_eq!(outcome.finished, [Some(6), Some(7), Some(8)]);
}

/// Jobs of exact length on equal nodes, some with deadlines.
fn random(seed: u64, deadlines: bool) -> TestCase {
    let mut rng = Rng::stream(seed, 1);
    let cluster = ["1x2", "2x4", "1x8", "3x2"][rng.below(4) as usize];
    let mut case = TestCase::new("chronus", cluster, "x 0 1 1");
    let model = case.jobs.pop().unwrap();
    let mut submit = 0;
    for i in 0..3 + rng.below(12) {
        submit += rng.below(4);
        let mut job = model.clone();
        job.name = format!("j{i}");
        job.submit = submit;
        let gpus = 1 + rng.below(u64::from(case.cluster.gpus())) as u16;
        (job.spec.gpus, job.spec.gpus_max) = (gpus, gpus);
        job.work = (1 + rng.below(9)) as f64;
        job.spec.work = Some(Number::of(job.work));
        if deadlines && rng.chance(0.6) {
            let due = submit + job.work as u64 + rng.below(20);
            job.spec.deadline = Some(Time::from_secs(due as f64));
            if rng.chance(0.3) {
                let last = Time::from_secs((due + 5) as f64);
                job.spec.deadline_values =
                    vec![(Time::from_secs(due as f64), Number::of(10.0)), (last, Number::of(5.0))];
                job.spec.deadline = Some(last);
            }
        }
        case.jobs.push(job);
    }
    let slots = 1 + rng.below(3);
    let sign = ["adaptive", "plus", "minus"][rng.below(3) as usize];
    case.params = params(&json!({
        "slot_s": 1, "lease_s": slots, "safety": 1.0, "sign": sign,
        "short_s": if rng.chance(0.5) { 0 } else { 1_800 },
    }));
    case
}

#[test]
fn with_exact_estimates_every_guaranteed_deadline_is_met() {
    let mut promises = 0;
    for seed in 0..400 {
        let case = random(seed, true);
        let seen = fold(&case.run(), Seen::default());
        assert!(!seen.broken, "seed {seed}");
        for (job, _) in &seen.promised {
            let (_, at) = seen.finished.iter().find(|f| f.0 == *job).unwrap();
            let deadline = case.job(*job).spec.deadline.unwrap();
            assert!(*at <= deadline, "seed {seed}: {job} at {at}, due {deadline}");
            promises += 1;
        }
    }
    assert!(promises > 500, "only {promises} promises");
}

#[test]
fn without_deadlines_and_with_leases_of_one_tick_it_is_srsf() {
    for seed in 0..200 {
        let mut case = random(seed, false);
        case.params = params(&json!({"lease_s": 1, "slot_s": 1, "safety": 1.0, "rule": "count"}));
        let own = case.run();
        case.policy = "srsf".into();
        case.params = params(&json!({"rule": "count"}));
        assert_eq!(own.finished, case.run().finished, "seed {seed}");
    }
}
