//! Blind runs: policies are not told how long a step takes.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use roommate_core::cluster::Cluster;
use roommate_core::event::Event;
use roommate_core::idx::JobIdx;
use roommate_core::journal::metrics::{Fold, Metrics};
use roommate_core::journal::replay::Replay;
use roommate_core::journal::{self, Observer, ProfileLine, StepView, Writer};
use roommate_core::policy::{self, Params};
use roommate_core::state::Costs;
use roommate_core::time::Time;
use roommate_sim::fault::Faults;
use roommate_sim::serving::Measuring;
use roommate_sim::trace::TraceJob;
use roommate_sim::truth::{Truth, h200};
use roommate_sim::workload::{self, Setting, Workload};
use roommate_sim::world::{Setup, simulate};
use std::sync::Arc;

const MODELS: [&str; 4] = ["resnet50", "bert", "ncf", "vgg16"];

/// Jobs of four models, whose steps are longer by a factor and fewer by the same.
fn workload(longer: f64, scattered: bool) -> Workload {
    let job = |i: u32| {
        let own = if scattered { 1.0 + f64::from(i) / 100.0 } else { 1.0 };
        let (step_s, length_s) = (0.1 * own * longer, 60.0 * f64::from(1 + i * 7 % 11));
        let at_us = u64::from(i) * 20_000_000;
        TraceJob {
            model: Some(MODELS[i as usize % 4].into()),
            batch: 32,
            steps: length_s / step_s,
            step_s,
            ..TraceJob::new(format!("job-{i}"), at_us, 1 + i % 2, length_s)
        }
    };
    let cluster: Cluster = "1x4".parse().unwrap();
    workload::prepare((0..24).map(job).collect(), &Setting::of(&cluster)).unwrap().0
}

fn run(policy: &str, workload: &Workload, blind: Option<f64>) -> (Vec<u8>, Metrics) {
    let entry = policy::find(policy).unwrap();
    let params = entry.params(&Params::new()).unwrap().as_object().unwrap().clone();
    let truth = Truth::measured(Arc::new(h200().unwrap()));
    let setup = Setup {
        cluster: "1x4".parse().unwrap(),
        costs: Costs::default(),
        policy_name: policy.into(),
        policy: entry.build(&params).unwrap(),
        params,
        known_pairs: None,
        truth: truth.model(&workload.profiles).0,
        faults: Faults::default(),
        seed: 1,
        profiles: workload.profiles.clone(),
        teams: workload.teams.clone(),
        measure: None,
        measuring: Measuring::default(),
        blind,
    };
    let mut observers = (Fold::default(), Writer::new(Vec::new()));
    simulate(setup, workload.arrivals.iter().cloned(), &mut observers, &mut |_| {}).unwrap();
    (observers.1.finish().unwrap(), observers.0.metrics())
}

/// What was decided until the first sample with the length of a step.
#[derive(Default)]
struct Decisions {
    made: Vec<String>,
    first_sample: Option<Time>,
}

impl Observer for Decisions {
    fn profile(&mut self, line: &ProfileLine) {
        assert!(line.profile.step_unknown && line.profile.step_s == 1.0);
        assert!(line.profile.predicted.is_none() && line.profile.stages_s.is_none());
    }

    fn step(&mut self, step: &StepView<'_>) {
        let tells = |e: &&Event| matches!(e, Event::Sampled { sample, .. } if sample.step_s > 0.0);
        self.first_sample = self.first_sample.or(step.facts.iter().find(tells).map(|_| step.at));
        if self.first_sample.is_none() {
            self.made.push(format!("{} {:?} {:?}", step.at.0, step.actions, step.notes));
        }
    }
}

fn decisions(journal: &[u8]) -> Decisions {
    let mut decisions = Decisions::default();
    journal::read(journal, &mut decisions).unwrap();
    decisions
}

#[test]
fn policies_do_not_see_true_steps() {
    for entry in policy::POLICIES {
        let [one, other] =
            [1.0, 7.0].map(|longer| run(entry.name, &workload(longer, false), Some(0.05)).0);
        let [one, other] = [decisions(&one), decisions(&other)];
        assert!(one.first_sample.is_some(), "{}", entry.name);
        assert_eq!(one.made, other.made, "{}", entry.name);
    }
}

#[test]
fn blind_runs_replay_and_end() {
    for policy in ["roommate", "kernel-est", "gandiva", "srsf", "horus", "gavel-packed"] {
        let (journal, metrics) = run(policy, &workload(1.0, true), Some(0.1));
        let mut replay = Replay::default();
        journal::read(&journal[..], &mut replay).unwrap();
        assert_eq!((replay.difference, metrics.finished), (None, 24), "{policy}");
        assert!(metrics.avg_rho.is_some(), "lengths are declared");
    }
}

#[test]
fn policies_that_know_lengths_know_them_in_blind_runs() {
    // Whole GPUs, so that only the progress of a job before its first sample is not known; but
    // samples ask policies more often, which may order jobs of nearly equal length otherwise.
    for policy in ["sjf", "srtf", "srsf"] {
        let [clear, blind] =
            [None, Some(0.05)].map(|blind| run(policy, &workload(3.0, true), blind).1.avg_jct_s);
        let (clear, blind) = (clear.unwrap(), blind.unwrap());
        assert!((clear / blind - 1.0).abs() < 0.03, "{policy}: {clear} {blind}");
    }
}

#[test]
fn samples_are_repeated_and_scatter() {
    #[derive(Default)]
    struct Samples(Vec<(Time, f64, f64)>);
    impl Observer for Samples {
        fn step(&mut self, step: &StepView<'_>) {
            for fact in step.facts {
                if let Event::Sampled { job: JobIdx(0), sample } = fact {
                    let done = sample.done.map_or(f64::NAN, roommate_core::number::Number::get);
                    self.0.push((step.at, sample.step_s.get(), done));
                }
            }
        }
    }
    let mut workload = workload(1.0, false);
    workload.arrivals.truncate(1);
    workload.arrivals[0].work = 20_000.0;
    let mut seen = Samples::default();
    journal::read(&run("fifo", &workload, Some(0.05)).0[..], &mut seen).unwrap();
    let told: Vec<_> = seen.0.iter().filter(|(_, step_s, _)| *step_s > 0.0).collect();
    let at: Vec<f64> = told.iter().map(|s| s.0.secs()).collect();
    assert_eq!(at, [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0]);
    let exact = |s: &&&(Time, f64, f64)| s.1 == told[0].1;
    assert_eq!(told.iter().filter(exact).count(), 1, "each sample is drawn anew");
    for (at, step_s, done) in told {
        assert!((step_s / 0.1 - 1.0).abs() < 0.25, "{step_s}");
        assert!((done - at.secs() / 0.1).abs() < 1e-6 * done, "progress is exact: {done}");
    }
}

#[test]
fn jobs_of_one_model_and_batch_size_are_one_kind() {
    let scattered = workload(1.0, true);
    assert_eq!(scattered.profiles.len(), 24);
    let kinds: Vec<_> = scattered.profiles.iter().map(|(_, p)| p.kind.map(|k| k.0)).collect();
    assert_eq!(kinds[..6], [None, None, None, None, Some(0), Some(1)]);
    assert!(workload(1.0, false).profiles.iter().all(|(_, p)| p.kind.is_none()));
}
