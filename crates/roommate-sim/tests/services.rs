//! Services in the simulated world: what is measured, what is reported, and how they end.
#![allow(clippy::unwrap_used, clippy::float_cmp, reason = "this is a test")]

use roommate_core::event::{Event, Served};
use roommate_core::idx::{GpuIdx, Idx, JobIdx};
use roommate_core::journal::explain::Explain;
use roommate_core::journal::metrics::{Fold, Metrics};
use roommate_core::journal::replay::Replay;
use roommate_core::journal::{self, Observer, StepView, Writer};
use roommate_core::knobs::Knobs;
use roommate_core::plan::Plan;
use roommate_core::policy::{self, Params, Policy};
use roommate_core::state::Costs;
use roommate_core::time::{Span, Time};
use roommate_sim::fault::Faults;
use roommate_sim::serving::Measuring;
use roommate_sim::serving::requests::Bursts;
use roommate_sim::trace::{TraceClass, TraceJob, TraceService};
use roommate_sim::truth;
use roommate_sim::workload::{self, Setting};
use roommate_sim::world::{Setup, SimError, simulate};
use std::sync::Arc;

/// A service that answers a batch of any size up to 8 in 10 ms.
fn service(name: &str, load: &[(f64, f64)]) -> TraceJob {
    let mut job = TraceJob::new(name.into(), 0, 1, 0.0);
    (job.class, job.batch) = (TraceClass::Service, 8);
    job.service = Some(Box::new(TraceService {
        slo_ms: Some(50.0),
        warm_up_s: Some(5.0),
        batch_s: Some(0.01),
        load: load.to_vec(),
        ..TraceService::default()
    }));
    job
}

fn training(name: &str, at_s: f64, length_s: f64) -> TraceJob {
    TraceJob::new(name.into(), (at_s * 1e6) as u64, 1, length_s)
}

fn edit(mut job: TraceJob, with: impl Fn(&mut TraceService)) -> TraceJob {
    with(job.service.as_mut().unwrap());
    job
}

/// All facts about one job.
#[derive(Default)]
struct Facts {
    of: JobIdx,
    served: Vec<(Time, Served)>,
    /// (time, load, 99th percentile in µs).
    sampled: Vec<(Time, f32, u32)>,
    cancelled: Vec<Time>,
}

impl Observer for Facts {
    fn step(&mut self, step: &StepView<'_>) {
        for fact in step.facts {
            match fact {
                Event::Served { job, served } if *job == self.of => {
                    self.served.push((step.at, *served));
                }
                Event::Sampled { job, sample } if *job == self.of && sample.load_rps > 0.0 => {
                    self.sampled.push((step.at, sample.load_rps.get(), sample.p99_us));
                }
                Event::Cancelled(job) if *job == self.of => self.cancelled.push(step.at),
                _ => {}
            }
        }
    }
}

struct Run {
    journal: String,
    facts: Facts,
    metrics: Metrics,
    end: Time,
}

struct World<'a> {
    cluster: &'a str,
    policy: &'a str,
    measured: bool,
    /// Place all jobs on one GPU without confining any.
    together: bool,
    measuring: Measuring,
}

struct Together;

impl Policy for Together {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        for job in plan.news.ready.iter().copied() {
            let knobs = Knobs { sm_permille: 0, ..plan.spec(job).knobs };
            plan.place(job, &[GpuIdx(0)], knobs).unwrap();
        }
    }
}

const PLAIN: World<'_> = World {
    cluster: "1x2",
    policy: "fifo-backfill",
    measured: false,
    together: false,
    measuring: Measuring { window: Span(10_000_000), exact: false, gate: false },
};
const EXACT: World<'_> =
    World { measuring: Measuring { window: Span(10_000_000), exact: true, gate: false }, ..PLAIN };

fn run(world: &World<'_>, jobs: Vec<TraceJob>) -> Result<Run, SimError> {
    let cluster = world.cluster.parse().unwrap();
    let (work, _) = workload::prepare(jobs, &Setting::of(&cluster)).unwrap();
    let name = if world.measured { "measured" } else { "none" };
    let atlas = || truth::h200().map(Arc::new);
    let truth = truth::find(name).unwrap().build(atlas, || unreachable!()).unwrap();
    let entry = policy::find(world.policy).unwrap();
    let serde_json::Value::Object(params) = entry.params(&Params::new()).unwrap() else { panic!() };
    let setup = Setup {
        cluster,
        costs: Costs::default(),
        policy_name: world.policy.into(),
        policy: if world.together { Box::new(Together) } else { entry.build(&params).unwrap() },
        params,
        known_pairs: None,
        truth: truth.model(&work.profiles).0,
        faults: Faults::default(),
        seed: 3,
        profiles: work.profiles,
        teams: work.teams,
        measure: None,
        measuring: world.measuring,
        blind: None,
    };
    let mut observer = (Writer::new(Vec::new()), (Facts::default(), Fold::default()));
    let end = simulate(setup, work.arrivals.into_iter(), &mut observer, &mut |_| {})?;
    let (writer, (facts, fold)) = observer;
    let journal = String::from_utf8(writer.finish().unwrap()).unwrap();
    Ok(Run { journal, facts, metrics: fold.metrics(), end })
}

fn outcome(run: &Run, job: &str) -> Vec<String> {
    let mut explain = Explain::new(job);
    journal::read(run.journal.as_bytes(), &mut explain).unwrap();
    explain.moments.iter().map(|m| format!("{} {}", m.at, m.what)).collect()
}

#[test]
fn a_run_ends_with_its_training_and_services_end_with_it() {
    for world in [&PLAIN, &EXACT] {
        let jobs = vec![service("s", &[(0.0, 100.0)]), training("a", 7.0, 300.0)];
        let run = run(world, jobs).unwrap();
        assert_eq!(run.end, Time::from_secs(307.0));
        assert_eq!(run.facts.cancelled, [run.end]);
        assert_eq!((run.metrics.jobs, run.metrics.finished), (1, 1));
        assert_eq!(run.metrics.avg_jct_s, Some(300.0));
        let service = &run.metrics.services[0];
        assert_eq!(service.served.late, 0);
        // From 5 s, when it is warm, in windows that end at 10, 20, … 300 s, and the remainder.
        assert_eq!(service.served.windows, 31);
        let rate = service.served.requests as f64 / 302.0;
        assert!((rate - 100.0).abs() < 3.0, "{rate}");
        // A single request waits 5 ms for its batch to fill and is answered within 10 ms.
        assert!((14_000..21_000).contains(&service.served.p99_us), "{:?}", service.served);
        let mut replay = Replay::default();
        journal::read(run.journal.as_bytes(), &mut replay).unwrap();
        assert_eq!((replay.difference, replay.refused), (None, None));
    }
}

#[test]
fn only_changes_of_load_are_sampled_at_the_window_end() {
    let load = [(0.0, 100.0), (3_605.0, 300.0), (7_205.0, 100.0)];
    for world in [&PLAIN, &EXACT] {
        let jobs = vec![service("s", &load), training("a", 0.0, 10_000.0)];
        let run = run(world, jobs).unwrap();
        let reported: Vec<u64> = run.facts.sampled.iter().map(|s| s.0.0 / 1_000_000).collect();
        // The first full window; then, for each change of load, the window that contains it and the
        // next one.
        assert_eq!(reported, [10, 20, 3_610, 3_620, 7_210, 7_220], "{:?}", run.facts.sampled);
        let accounts: Vec<u64> = run.facts.served.iter().map(|s| s.0.0 / 1_000_000).collect();
        assert_eq!(accounts, [10, 20, 3_600, 3_610, 3_620, 7_200, 7_210, 7_220, 10_000]);
        let windows: u32 = run.facts.served.iter().map(|s| s.1.windows).sum();
        assert_eq!(windows, 1_000);
        // The policy is asked only at the two submissions, at the end, and for the samples.
        assert!(run.metrics.events <= 2 + 1 + 6, "{}", run.metrics.events);
    }
}

#[test]
fn an_infeasible_slo_is_always_violated_and_reported_once() {
    for world in [&PLAIN, &EXACT] {
        let infeasible = edit(service("s", &[(0.0, 100.0)]), |s| s.slo_ms = Some(5.0));
        let run = run(world, vec![infeasible, training("a", 0.0, 600.0)]).unwrap();
        let served = run.metrics.served().unwrap();
        assert_eq!((served.late, served.over), (served.requests, served.windows));
        assert_eq!(run.metrics.services[0].goodput_rps, 0.0);
        let missed = outcome(&run, "s");
        let missed: Vec<&String> = missed.iter().filter(|m| m.contains("misses")).collect();
        assert_eq!(missed.len(), 1, "{missed:?}");
    }
}

#[test]
fn a_service_without_requests_meets_its_slo() {
    for world in [&PLAIN, &EXACT] {
        let run = run(world, vec![service("s", &[(0.0, 0.0)]), training("a", 0.0, 600.0)]).unwrap();
        let served = run.metrics.served().unwrap();
        assert_eq!((served.requests, served.over, served.windows), (0, 0, 60));
        // A load of zero would mean that nothing was measured.
        let reported: Vec<f32> = run.facts.sampled.iter().map(|s| s.1).collect();
        assert!(reported.len() <= 1 && reported.iter().all(|l| *l < 1e-3), "{reported:?}");
        let reported = outcome(&run, "s");
        assert!(reported.iter().any(|m| m.contains("no requests")), "{reported:?}");
    }
}

#[test]
fn a_service_that_never_warms_up_gets_requests_after_300_s() {
    for world in [&PLAIN, &EXACT] {
        let never = edit(service("s", &[(0.0, 100.0)]), |s| s.warm_up_s = Some(1e9));
        let run = run(world, vec![never, training("a", 0.0, 900.0)]).unwrap();
        let served = run.metrics.served().unwrap();
        assert_eq!((served.windows, served.over), (60, 60), "600 s after the first 300");
        assert_eq!(served.late, served.requests);
        assert!((served.requests as f64 / 60_000.0 - 1.0).abs() < 0.02, "{served:?}");
        assert!(run.facts.sampled.is_empty(), "there is nothing to sample");
        let reported = outcome(&run, "s");
        assert!(reported.iter().any(|m| m.starts_with("5m 10s misses")), "{reported:?}");
    }
}

#[test]
fn requests_to_a_preempted_service_are_late() {
    // srtf preempts the service for the training job.
    let world = World { cluster: "1x1", policy: "srtf", ..PLAIN };
    let jobs = vec![service("s", &[(0.0, 10.0)]), training("a", 100.0, 50.0)];
    let run = run(&world, jobs).unwrap();
    assert_eq!((run.metrics.finished, run.metrics.preemptions), (1, 1));
    let served = run.metrics.served().unwrap();
    assert!((served.late as f64 / 500.0 - 1.0).abs() < 0.1, "{served:?}");
    assert!((5..=6).contains(&served.over), "{served:?}");
}

#[test]
fn training_that_waits_for_services_is_reported_as_stuck() {
    let world = World { cluster: "1x1", ..PLAIN };
    let stuck = run(&world, vec![service("s", &[(0.0, 9.0)]), training("a", 1.0, 5.0)]).err();
    assert!(matches!(stuck, Some(SimError::Stuck { waiting: 1, .. })), "{stuck:?}");
    let message = stuck.unwrap().to_string();
    assert!(message.contains("services, which never end, hold 1 of 1 GPUs"), "{message}");
}

#[test]
fn without_training_a_run_lasts_a_service_s_duration() {
    let mut alone = service("s", &[(0.0, 50.0)]);
    alone.duration_s = 125.0;
    let run = run(&PLAIN, vec![alone]).unwrap();
    assert_eq!(run.end, Time::from_secs(125.0));
    assert_eq!(run.metrics.services[0].served.windows, 13, "the last window is half as long");
}

/// Six models with their SLOs under loads from idle to overload, some bursty, beside training jobs
/// that arrive and finish on the same GPUs.
fn busy_mix() -> Vec<TraceJob> {
    let models = ["resnet50", "inception_v3", "gpt2", "bert", "roberta", "yolos-tiny"];
    let mut jobs = Vec::new();
    for (i, model) in models.iter().enumerate() {
        for (k, rps) in [50.0, 600.0, 1_500.0].into_iter().enumerate() {
            let mut job = TraceJob::new(format!("{model}-{k}"), 0, 1, 0.0);
            (job.class, job.batch, job.model) = (TraceClass::Service, 32, Some((*model).into()));
            job.service = Some(Box::new(TraceService {
                slo_ms: Some([40.0, 60.0, 90.0][(i + k) % 3]),
                load: vec![(0.0, rps), (900.0, 1.6 * rps), (1_500.0, 0.5 * rps)],
                bursts: (k == 0).then_some(Bursts { times: 4.0, burst_s: 5.0, calm_s: 25.0 }),
                ..TraceService::default()
            }));
            jobs.push(job);
        }
    }
    for i in 0..18 {
        let models = ["resnet18", "bert", "vit", "lstm", "ncf"];
        let mut job = training(&format!("t{i}"), 40.0 + 90.0 * f64::from(i), 600.0);
        job.model = Some(models[i as usize % models.len()].into());
        job.class = TraceClass::BestEffort;
        jobs.push(job);
    }
    jobs
}

#[test]
fn repeated_windows_agree_with_simulating_every_request() {
    let world = World { cluster: "18x1:h200", policy: "antman", measured: true, ..PLAIN };
    let fast = run(&world, busy_mix()).unwrap();
    let exact = run(&World { measuring: EXACT.measuring, ..world }, busy_mix()).unwrap();
    assert!((fast.end.secs() / exact.end.secs() - 1.0).abs() < 0.01);
    // First of steady loads, then of bursty ones.
    let (mut worst_late, mut worst_p99) = ([0.0f64; 2], [0.0f64; 2]);
    for (a, b) in fast.metrics.services.iter().zip(&exact.metrics.services) {
        assert_eq!(a.name, b.name);
        let late = |s: &Served| s.late as f64 / s.requests as f64;
        let kind = usize::from(a.name.ends_with("-0"));
        worst_late[kind] = worst_late[kind].max((late(&a.served) - late(&b.served)).abs());
        let p99 = f64::from(a.served.p99_us) / f64::from(b.served.p99_us);
        worst_p99[kind] = worst_p99[kind].max((p99 - 1.0).abs());
        let requests = a.served.requests as f64 / b.served.requests as f64;
        let most = if a.name.ends_with("-0") { 0.1 } else { 0.01 };
        assert!((requests - 1.0).abs() < most, "{}: {requests}", a.name);
    }
    let late = |run: &Run| {
        let s = run.metrics.served().unwrap();
        (s.late as f64 / s.requests as f64, f64::from(s.over) / f64::from(s.windows))
    };
    assert!((late(&fast).0 - late(&exact).0).abs() < 0.005);
    assert!((late(&fast).1 - late(&exact).1).abs() < 0.02);
    assert!(worst_late.iter().all(|l| *l < 0.03), "{worst_late:?}");
    assert!(worst_p99[0] < 0.1 && worst_p99[1] < 0.25, "{worst_p99:?}");
}

#[test]
fn the_load_of_a_service_slows_training() {
    // The same job beside a service without requests, and beside one that is always busy.
    let length = |rps: f64| {
        let mut job = TraceJob::new("s".into(), 0, 1, 0.0);
        (job.class, job.batch, job.model) = (TraceClass::Service, 64, Some("gpt2".into()));
        let load = vec![(0.0, rps)];
        job.service = Some(Box::new(TraceService { load, ..TraceService::default() }));
        let mut task = training("a", 30.0, 6_000.0);
        (task.model, task.class) = (Some("vit".into()), TraceClass::BestEffort);
        let world = World { cluster: "1x1:h200", together: true, measured: true, ..PLAIN };
        run(&world, vec![job, task]).unwrap().metrics.avg_jct_s.unwrap()
    };
    let (idle, busy) = (length(0.0), length(2_500.0));
    assert!(busy > 1.1 * idle, "{idle} {busy}");
}

#[test]
fn the_same_seed_gives_the_same_journal() {
    let world = World { cluster: "18x1:h200", policy: "antman", measured: true, ..PLAIN };
    let journals = [0, 1].map(|_| run(&world, busy_mix()).unwrap().journal);
    assert!(journals[0] == journals[1]);
    let mut replay = Replay::default();
    journal::read(journals[0].as_bytes(), &mut replay).unwrap();
    assert_eq!((replay.difference, replay.refused), (None, None));
    assert!(replay.steps > 100);
}

#[test]
fn jobs_are_numbered_from_zero() {
    // `Facts` relies on it.
    assert_eq!(JobIdx::default(), JobIdx::from_usize(0));
}
