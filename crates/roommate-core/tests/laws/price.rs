//! The cost of a start or a move that a plan predicts is the cost once the plan is committed.

use crate::random::{self, CaseOptions};
use roommate_core::idx::JobIdx;
use roommate_core::plan::Plan;
use roommate_core::policy::{POLICIES, Policy};
use roommate_core::time::Span;
use std::sync::mpsc::{self, Sender};

/// A job that will be on other GPUs: whether it had GPUs before, and the predicted cost.
type Priced = (JobIdx, bool, Span);

/// A policy that records the predicted cost of its decisions.
struct Pricing(Box<dyn Policy>, Sender<Priced>);

impl Policy for Pricing {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        self.0.schedule(plan);
        let placed = plan.placed.iter().filter(|j| plan.was_on(*j) != &plan.job(*j).gpus[..]);
        for job in placed {
            let price = plan.price(job, &plan.job(job).gpus);
            self.1.send((job, !plan.was_on(job).is_empty(), price)).unwrap();
        }
    }
}

#[test]
fn a_plan_knows_the_price_of_every_start() {
    let mut again = 0;
    for entry in POLICIES {
        for seed in 0..100 {
            let mut case = random::case(seed, entry, CaseOptions::WILD);
            case.costs.resume = Span::from_secs(1.0);
            case.costs.migrate = Some(Span::from_secs(2.0));
            let (sender, priced) = mpsc::channel();
            let policy = Pricing(entry.build(&case.params).unwrap(), sender);
            case.run_policy(Box::new(policy), &mut |engine| {
                let state = engine.state();
                for (job, moves, price) in priced.try_iter() {
                    let cost = if moves { state.move_cost(job) } else { state.start_cost(job) };
                    assert_eq!(price, cost, "{job} at {}: {}", state.now, random::compact(&case));
                    again += u32::from(state.jobs[job].starts == 2);
                }
            });
        }
    }
    assert!(again > 1_000, "only {again} second starts");
}
