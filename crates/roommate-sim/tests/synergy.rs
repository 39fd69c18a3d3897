//! Synergy's worked example as a trace: eight jobs on one server, exact to the second.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use roommate_core::event::Event;
use roommate_core::idx::{IdxVec, JobIdx};
use roommate_core::interference::Undisturbed;
use roommate_core::journal::{JobLine, Observer, StepView};
use roommate_core::performance::sensitivity::{Host, Sensitivity};
use roommate_core::policy;
use roommate_core::state::Costs;
use roommate_core::time::Time;
use roommate_sim::compat;
use roommate_sim::fault::Faults;
use roommate_sim::serving::Measuring;
use roommate_sim::trace::TraceJob;
use roommate_sim::workload::{self, Setting};
use roommate_sim::world::{Setup, simulate};
use std::sync::Arc;

/// Steps, seconds per step, best CPU cores and GB, and the speed-up they bring.
const JOBS: [(f64, f64, u32, f64, f64); 8] = [
    (3000.0, 0.6, 12, 125.0, 2.94),
    (3000.0, 0.615, 12, 125.0, 2.89),
    (5000.0, 0.12, 1, 20.0, 1.0),
    (5000.0, 0.12, 1, 20.0, 1.0),
    (5000.0, 0.12, 1, 20.0, 1.0),
    (5000.0, 0.12, 1, 20.0, 1.0),
    (5000.0, 0.12, 1, 20.0, 1.0),
    (5000.0, 0.12, 1, 20.0, 1.0),
];

fn jobs() -> Vec<TraceJob> {
    let job = |(i, (steps, step_s, cores, gb, speedup)): (usize, (f64, f64, u32, f64, f64))| {
        let usual = Host { cpu_milli: 3_000, mib: 64_000 };
        let best = Host { cpu_milli: cores * 1000, mib: (gb * 1024.0) as u32 };
        let mut job = TraceJob::new(i.to_string(), i as u64 * 1_000_000, 1, steps * step_s);
        (job.steps, job.step_s) = (steps, step_s);
        job.model = Some(format!("{step_s}"));
        job.sensitivity = Sensitivity::of_best(usual, best, speedup).map(Arc::new);
        job
    };
    JOBS.into_iter().enumerate().map(job).collect()
}

/// Seconds from submission to completion of each job; job `i` is submitted at `i` seconds.
#[derive(Default)]
struct Jcts(IdxVec<JobIdx, u64>);

impl Observer for Jcts {
    fn job(&mut self, _: &JobLine) {
        self.0.push(0);
    }
    fn step(&mut self, step: &StepView<'_>) {
        for fact in step.facts {
            if let Event::Finished(job) = fact {
                let submitted = Time(u64::from(job.0) * 1_000_000);
                self.0[*job] = (step.at - submitted).0 / 1_000_000;
            }
        }
    }
}

fn jcts(mechanism: &str, order: &str) -> IdxVec<JobIdx, u64> {
    let compat = compat::find("synergy").unwrap();
    let name = format!("synergy-{mechanism}");
    let entry = policy::find(&name).unwrap();
    let mut params = entry.compat_params("synergy").unwrap();
    params.insert("order".into(), order.into());
    let cluster = "1x8:v100:24c:500g".parse().unwrap();
    let setting = Setting { compat: Some(compat), ..Setting::of(&cluster) };
    let (workload, _) = workload::prepare(jobs(), &setting).unwrap();
    let setup = Setup {
        costs: compat.costs(Costs::default(), &name),
        policy: entry.build(&params).unwrap(),
        cluster,
        policy_name: name,
        params,
        known_pairs: None,
        truth: Box::new(Undisturbed),
        faults: Faults::default(),
        seed: 0,
        profiles: workload.profiles,
        teams: workload.teams,
        measure: None,
        measuring: Measuring::default(),
        blind: None,
    };
    let mut jcts = Jcts::default();
    simulate(setup, workload.arrivals.into_iter(), &mut jcts, &mut |_| {}).unwrap();
    jcts.0
}

#[test]
fn the_worked_example_is_exact_to_the_second() {
    let six = |first: u64| -> [u64; 6] { std::array::from_fn(|i| first - i as u64) };
    let check = |mechanism: &str, order: &str, two: [u64; 2], others: u64| {
        let found = jcts(mechanism, order);
        let wanted: Vec<u64> = two.into_iter().chain(six(others)).collect();
        assert_eq!(*found, wanted[..], "{mechanism} {order}");
    };
    check("proportional", "fifo", [1800, 2399], 898);
    check("proportional", "srtf", [1800, 2399], 898);
    check("greedy", "fifo", [900, 1199], 1498);
    check("tune", "fifo", [1200, 1199], 898);
    check("tune", "srtf", [900, 1499], 898);
}
