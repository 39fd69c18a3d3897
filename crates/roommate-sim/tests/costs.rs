//! Costs are charged when their cause happens and never otherwise: migration and tuning, tested
//! with policies written for it, since no policy of the registry is certain to do either.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use roommate_core::idx::{GpuIdx, JobIdx, ProfileIdx};
use roommate_core::interference::{Estimate, Interference, Truth, Undisturbed};
use roommate_core::job::Spec;
use roommate_core::journal::metrics::Fold;
use roommate_core::knobs::Knobs;
use roommate_core::plan::Plan;
use roommate_core::policy::{Params, Policy};
use roommate_core::profile::Profile;
use roommate_core::state::{Costs, State};
use roommate_core::time::{Span, Time};
use roommate_sim::fault::Faults;
use roommate_sim::serving::Measuring;
use roommate_sim::world::{Arrival, Setup, simulate};

/// Starts job 0 on GPU 0 and applies one edit to it after ten seconds.
struct Once<F>(F, bool);

impl<F: FnMut(&mut Plan<'_>) + Send> Policy for Once<F> {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        let ten = Time::from_secs(10.0);
        if plan.pending.contains(JobIdx(0)) {
            plan.place(JobIdx(0), &[GpuIdx(0)], Knobs::WHOLE).unwrap();
        }
        if plan.now >= ten && !std::mem::replace(&mut self.1, true) {
            (self.0)(plan);
        } else if plan.now < ten {
            plan.wake_at(ten);
        }
    }
}

/// A run of one profile with steps of one second.
fn setup(cluster: &str, costs: Costs, policy: Box<dyn Policy>, truth: Box<dyn Truth>) -> Setup {
    Setup {
        cluster: cluster.parse().unwrap(),
        costs,
        policy_name: "of this test".into(),
        params: Params::new(),
        policy,
        known_pairs: None,
        truth,
        faults: Faults::default(),
        seed: 0,
        profiles: vec![("work".into(), Profile::of_step(1.0))],
        teams: vec!["all".into()],
        measure: None,
        measuring: Measuring::default(),
        blind: None,
    }
}

/// Completion time in seconds of a job of 100 seconds under these costs and this edit.
fn ends_s(costs: Costs, what: impl FnMut(&mut Plan<'_>) + Send + 'static) -> f64 {
    let policy = Box::new(Once(what, false));
    let setup = setup("1x2", costs, policy, Box::new(Undisturbed));
    let job = Arrival {
        at: Time::ZERO,
        name: "a".into(),
        spec: Spec::training(1, 100.0, ProfileIdx(0)),
        work: 100.0,
        requests: None,
    };
    let mut fold = Fold::default();
    simulate(setup, std::iter::once(job), &mut fold, &mut |_| {}).unwrap();
    fold.metrics().makespan_s
}

fn costs(restart_s: f64, migrate_s: Option<f64>, tune_s: f64) -> Costs {
    Costs {
        restart: Span::from_secs(restart_s),
        migrate: migrate_s.map(Span::from_secs),
        tune: Span::from_secs(tune_s),
        ..Costs::default()
    }
}

fn move_it(plan: &mut Plan<'_>) {
    plan.release(JobIdx(0));
    plan.place(JobIdx(0), &[GpuIdx(1)], Knobs::WHOLE).unwrap();
}

fn halve_it(plan: &mut Plan<'_>) {
    plan.tune(JobIdx(0), Knobs { sm_permille: 500, ..Knobs::WHOLE }).unwrap();
}

#[test]
fn without_changes_nothing_is_charged() {
    assert_eq!(ends_s(costs(62.0, Some(20.0), 5.0), |_| {}), 100.0);
}

#[test]
fn a_migration_costs_a_restart_unless_set_otherwise() {
    assert_eq!(ends_s(costs(62.0, None, 5.0), move_it), 162.0);
    assert_eq!(ends_s(costs(62.0, Some(20.0), 5.0), move_it), 120.0);
    assert_eq!(ends_s(costs(62.0, Some(0.0), 5.0), move_it), 100.0);
}

#[test]
fn a_move_to_the_same_gpu_costs_nothing() {
    let there_and_back = |plan: &mut Plan<'_>| {
        move_it(plan);
        plan.release(JobIdx(0));
        plan.place(JobIdx(0), &[GpuIdx(0)], Knobs::WHOLE).unwrap();
    };
    assert_eq!(ends_s(costs(62.0, Some(20.0), 5.0), there_and_back), 100.0);
}

#[test]
fn tuning_pauses_the_job_and_then_changes_its_speed() {
    // Ten seconds at full speed, the pause, then 90 steps at half the speed.
    assert_eq!(ends_s(costs(62.0, None, 0.0), halve_it), 190.0);
    assert_eq!(ends_s(costs(62.0, None, 5.0), halve_it), 195.0);
}

/// Starts every job on GPU 0 at once.
struct Together;

impl Policy for Together {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        let waiting: Vec<JobIdx> = plan.pending.iter().collect();
        for job in waiting {
            plan.place(job, &[GpuIdx(0)], Knobs { sm_permille: 0, ..Knobs::WHOLE }).unwrap();
        }
    }
}

/// Halves the speed for each co-located job.
struct Halves;

impl Truth for Halves {}

impl Interference for Halves {
    fn speed(&self, _: &State, _: u8, tenants: &[(JobIdx, Knobs)], _: usize) -> Estimate {
        Estimate::certain(0.5_f64.powi(tenants.len() as i32 - 1))
    }
}

#[test]
fn a_quiet_start_slows_no_other_job() {
    let last_end = |quiet_start: bool| {
        let costs = Costs { start: Span::from_secs(20.0), quiet_start, ..Costs::default() };
        let setup = setup("1x1", costs, Box::new(Together), Box::new(Halves));
        let job = |i: u32| Arrival {
            at: Time::from_secs(40.0 * f64::from(i)),
            name: i.to_string(),
            spec: Spec::training(1, 100.0, ProfileIdx(0)),
            work: 100.0,
            requests: None,
        };
        let mut fold = Fold::default();
        simulate(setup, (0..2).map(job), &mut fold, &mut |_| {}).unwrap();
        fold.metrics()
    };
    // The first job runs alone from 20 to 60 and then beside the second: 40 steps, then 60 at half
    // the speed. Then the second has 40 steps left.
    let quiet = last_end(true);
    assert_eq!((quiet.avg_jct_s, quiet.makespan_s), (Some(180.0), 220.0));
    // If starting disturbs, the first job is slowed down from 40 on and ends at 200; the second has
    // 30 steps left then.
    let loud = last_end(false);
    assert_eq!((loud.avg_jct_s, loud.makespan_s), (Some(195.0), 230.0));
}
