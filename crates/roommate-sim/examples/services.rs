//! Benchmark of simulating services: `services GPUS TASKS GAP_S [RPS] [exact]` places one service
//! on every GPU and submits training jobs, on average one every `GAP_S` seconds; each takes most of
//! a GPU beside a service. Prints the wall time and the measured latencies.
#![allow(
    clippy::print_stdout,
    clippy::disallowed_types,
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "a benchmark prints and has a clock"
)]

use roommate_core::idx::{GpuIdx, JobIdx};
use roommate_core::job::Class;
use roommate_core::journal::Writer;
use roommate_core::journal::metrics::Fold;
use roommate_core::knobs::Knobs;
use roommate_core::math::queueing::{Latencies, Queue};
use roommate_core::math::rng::Rng;
use roommate_core::plan::Plan;
use roommate_core::policy::{Params, Policy};
use roommate_core::state::Costs;
use roommate_sim::fault::Faults;
use roommate_sim::serving::Measuring;
use roommate_sim::trace::{TraceClass, TraceJob, TraceService};
use roommate_sim::truth::{self, Truth};
use roommate_sim::workload::{self, Setting};
use roommate_sim::world::{Setup, simulate};
use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::Instant;

/// Services of the published set-up, with their SLOs in ms.
const SERVICES: [(&str, f64); 6] = [
    ("resnet50", 150.0),
    ("inception_v3", 120.0),
    ("gpt2", 100.0),
    ("bert", 330.0),
    ("roberta", 110.0),
    ("yolos-tiny", 2_200.0),
];

/// Training jobs: name, probability, least and most GPU-hours.
const TASKS: [(&str, f64, f64, f64); 9] = [
    ("vgg16-cifar", 0.14, 0.2, 1.0),
    ("squeezenet-cifar", 0.14, 0.2, 1.0),
    ("resnet50-cifar", 0.14, 0.2, 1.0),
    ("ncf-ml20m", 0.12, 1.0, 10.0),
    ("lstm-wikitext", 0.12, 1.0, 10.0),
    ("deeplab-mbv3", 0.12, 1.0, 10.0),
    ("bert-squad", 0.12, 10.0, 100.0),
    ("gpt2-lm", 0.10, 10.0, 100.0),
    ("resnet18-imagenet", 0.02, 100.0, 120.0),
];

/// The share of a service, and of a training job beside it.
const SERVICE: Knobs = Knobs { sm_permille: 300, ..Knobs::WHOLE };
const TASK: Knobs = Knobs { sm_permille: 700, ..Knobs::WHOLE };

/// Places every service on a GPU of its own, and training jobs beside services on arrival.
#[derive(Default)]
struct OneEach {
    waiting: VecDeque<JobIdx>,
    free: Vec<GpuIdx>,
    services: u32,
}

impl Policy for OneEach {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        let gone: Vec<JobIdx> = plan.news.left.to_vec();
        self.waiting.extend(plan.news.ready.iter().filter(|j| plan.pending.contains(**j)));
        if !gone.is_empty() {
            self.free.clear();
            let alone = plan.gpus.indices().filter(|g| plan.gpu(*g).tenants.len() == 1);
            self.free.extend(alone);
        }
        while let Some(job) = self.waiting.pop_front() {
            let spec = plan.spec(job);
            let own = |knobs: Knobs| Knobs { sm_permille: knobs.sm_permille, ..spec.knobs };
            if spec.class == Class::Service {
                let (gpu, knobs) = (GpuIdx(self.services), own(SERVICE));
                self.services += 1;
                plan.place(job, &[gpu], knobs).unwrap();
                self.free.push(gpu);
            } else if let Some(gpu) = self.free.pop() {
                let knobs = own(TASK);
                plan.place(job, &[gpu], knobs).unwrap();
            } else {
                self.waiting.push_front(job);
                return;
            }
        }
    }
}

fn jobs(gpus: u32, tasks: u32, gap_s: f64, rps: f64) -> Vec<TraceJob> {
    let mut rng = Rng::new(5);
    let mut jobs = Vec::new();
    for i in 0..gpus {
        let (model, slo_ms) = SERVICES[i as usize % SERVICES.len()];
        let mut job = TraceJob::new(format!("s{i}"), 0, 1, 0.0);
        let load = vec![(0.0, rps)];
        let service = TraceService { slo_ms: Some(slo_ms), load, ..TraceService::default() };
        (job.class, job.model) = (TraceClass::Service, Some(model.into()));
        (job.batch, job.service) = (16, Some(Box::new(service)));
        jobs.push(job);
    }
    let mut at_s = 60.0;
    for i in 0..tasks {
        at_s += rng.exp(gap_s);
        let (model, _, least, most) = TASKS[rng.weighted(&TASKS.map(|t| t.1))];
        let hours = least * f64::powf(most / least, rng.unit());
        let mut job = TraceJob::new(format!("t{i}"), (at_s * 1e6) as u64, 1, hours * 3_600.0);
        job.model = Some(model.into());
        jobs.push(job);
    }
    jobs
}

/// Counts written bytes.
#[derive(Default)]
struct Counter(u64);

impl Write for Counter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Prints the mean time of the analytic queueing model over loads and batch sizes.
fn time_queueing() {
    let mut latencies = Latencies::default();
    let (began, mut n) = (Instant::now(), 0);
    for batch in [1, 4, 16, 64, 256] {
        let batch_s = |n: u32| 0.006 + 0.000_2 * f64::from(n);
        for percent in 1..95 {
            let rate = f64::from(percent) / 100.0 * f64::from(batch) / batch_s(batch);
            latencies.solve(&Queue { rate, batch, timeout_s: 0.01, batch_s: &batch_s });
            n += 1;
        }
    }
    println!("analytic queue: {:.1} µs", began.elapsed().as_secs_f64() * 1e6 / f64::from(n));
}

fn main() {
    time_queueing();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, or: f64| args.get(i).and_then(|a| a.parse().ok()).unwrap_or(or);
    let (gpus, tasks) = (number(0, 1_000.0) as u32, number(1, 5_000.0) as u32);
    let (gap_s, rps) = (number(2, 2.0), number(3, 200.0));
    let exact = args.iter().any(|a| a == "exact");
    let cluster = format!("{gpus}x1:h200").parse().unwrap();
    let (work, _) =
        workload::prepare(jobs(gpus, tasks, gap_s, rps), &Setting::of(&cluster)).unwrap();
    let (truth, _) = Truth::measured(Arc::new(truth::h200().unwrap())).model(&work.profiles);
    let setup = Setup {
        cluster,
        costs: Costs::default(),
        policy_name: "one-each".into(),
        params: Params::new(),
        policy: Box::new(OneEach::default()),
        known_pairs: None,
        truth,
        faults: Faults::default(),
        seed: 1,
        profiles: work.profiles,
        teams: work.teams,
        measure: None,
        measuring: Measuring { exact, ..Measuring::default() },
        blind: None,
    };
    let mut folds = (Fold::default(), Writer::new(Counter::default()));
    let began = Instant::now();
    let end = simulate(setup, work.arrivals.into_iter(), &mut folds, &mut |_| {}).unwrap();
    let wall_s = began.elapsed().as_secs_f64();
    let metrics = folds.0.metrics();
    let served = metrics.served().unwrap();
    println!(
        "{gpus} services at {rps}/s, {} of {tasks} tasks in {end}: {wall_s:.2} s",
        metrics.finished
    );
    println!(
        "{:.3e} requests in {} windows, {:.4} % late, {:.4} % of windows over, p50 {:.2} ms, p99 \
         {:.2} ms, worst {:.2} ms",
        served.requests as f64,
        served.windows,
        100.0 * served.late as f64 / served.requests as f64,
        100.0 * f64::from(served.over) / f64::from(served.windows),
        f64::from(served.p50_us) / 1e3,
        f64::from(served.p99_us) / 1e3,
        f64::from(served.worst_us) / 1e3,
    );
    println!(
        "mean completion {:.1} s; policy asked {} times; journal {:.1} MB",
        metrics.avg_jct_s.unwrap_or(0.0),
        metrics.events,
        folds.1.finish().unwrap().0 as f64 / 1e6
    );
}
