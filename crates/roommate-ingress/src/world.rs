//! A simulated service beside simulated training, to try the law of the gate.
//!
//! Training is a series of kernels that one thread launches, ahead of the GPU as far as the gate's
//! library lets it. Kernels that were launched run on after the gate was closed. A batch advances
//! at its full speed while no kernel of training runs, and at a part of it beside one.

use crate::guard::Guard;
use crate::passed::Passed;
use crate::queue::{InWork, Queue, Rules, Waiting};
use crate::spec::Objective;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

const TICK_S: f64 = 50e-6;
/// For how long a server's process stands still at times.
const STALL_S: f64 = 0.07;
/// The part of their speed that kernels of training lose beside a full batch, and beside the
/// smallest one.
const LOST_FULL: f64 = 0.5;
const LOST_LEAST: f64 = 0.05;

/// A kernel of training.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel {
    pub(crate) seconds: f64,
    /// The part of its speed that a batch has beside it.
    pub(crate) leaves: f64,
}

/// How far training runs ahead of the GPU.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ahead {
    /// By this many launches, however long they are.
    Launches(usize),
    /// By this much work, or one kernel.
    Seconds(f64),
}

/// What answers requests.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Server {
    /// Batches on the GPU.
    Batches { base_s: f64, row_s: f64, most: u64 },
    /// One request after the other in a process that hardly uses the GPU, and stands still for a
    /// while at this part of the requests.
    Process { request_s: f64, gpu_part: f64, stalls_part: f64 },
}

/// The part of its capacity that a service is asked for, over time.
type Load<'a> = &'a dyn Fn(f64) -> f64;

pub(crate) struct World<'a> {
    pub(crate) server: Server,
    pub(crate) objective_ms: f64,
    pub(crate) kernels: Vec<Kernel>,
    pub(crate) ahead: Ahead,
    /// The part of its capacity that the service is asked for, over time.
    pub(crate) load: Load<'a>,
    pub(crate) seconds: f64,
    /// What happens before this time does not count.
    pub(crate) warm_s: f64,
    pub(crate) seed: u64,
}

#[derive(Debug)]
pub(crate) struct Found {
    /// The part of the requests that was late.
    pub(crate) late: f64,
    /// The speed of training, of its speed alone.
    pub(crate) training: f64,
    /// The part of the time for which the gate was closed.
    pub(crate) closed: f64,
    /// The part of the time for which training was told to stay close to the GPU.
    pub(crate) attended: f64,
}

struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// The kernels of training that were launched.
struct Gpu<'a> {
    kernels: &'a [Kernel],
    ahead: Ahead,
    next: usize,
    launched: VecDeque<Kernel>,
    done_s: f64,
}

impl Gpu<'_> {
    fn launch(&mut self) {
        loop {
            let room = match self.ahead {
                Ahead::Launches(most) => self.launched.len() < most,
                Ahead::Seconds(most) => {
                    let with_gpu: f64 = self.launched.iter().map(|k| k.seconds).sum();
                    self.launched.len() < 2 || with_gpu < most
                }
            };
            if !room {
                return;
            }
            self.launched.push_back(self.kernels[self.next]);
            self.next = (self.next + 1) % self.kernels.len();
        }
    }

    /// A tick of training at this part of its speed, with a new launch for each kernel that ends
    /// while the gate is open. How far a batch advances meanwhile, s.
    fn tick(&mut self, is_open: bool, speed: f64, luck: f64) -> f64 {
        let (mut left, mut advanced) = (TICK_S, 0.0);
        while left > 1e-12 {
            if is_open {
                self.launch();
            }
            let Some(kernel) = self.launched.front_mut() else { return advanced + left };
            let passed = left.min(kernel.seconds / speed);
            kernel.seconds -= passed * speed;
            self.done_s += passed * speed;
            advanced += passed * (kernel.leaves * luck).min(1.0);
            left -= passed;
            if kernel.seconds <= 1e-12 {
                self.launched.pop_front();
            }
        }
        advanced
    }
}

struct Work {
    left_s: f64,
    batch: InWork,
    arrivals: Vec<Instant>,
    luck: f64,
}

impl World<'_> {
    /// Requests per second that the service answers alone.
    fn capacity(&self) -> f64 {
        match self.server {
            Server::Batches { base_s, row_s, most } => most as f64 / (base_s + row_s * most as f64),
            Server::Process { request_s, .. } => 1.0 / request_s,
        }
    }

    pub(crate) fn run(&self) -> Found {
        match self.server {
            Server::Batches { .. } => self.run_batches(),
            Server::Process { .. } => self.run_process(),
        }
    }

    fn gpu(&self) -> Gpu<'_> {
        let (kernels, ahead) = (&self.kernels[..], self.ahead);
        Gpu { kernels, ahead, next: 0, launched: VecDeque::new(), done_s: 0.0 }
    }

    fn run_batches(&self) -> Found {
        let Server::Batches { base_s, row_s, most } = self.server else { unreachable!() };
        let objective = Objective { quantile: 0.99, ms: self.objective_ms };
        let limit = Duration::from_secs_f64(self.objective_ms / 1e3);
        let rules =
            Rules { max_batch: most, fill: None, roommates: true, objective: limit, most: 4096 };
        let (mut queue, mut guard) = (Queue::new(rules), Guard::new(objective, true));
        let (start, mut random) = (Instant::now(), Random::new(self.seed));
        let (mut gpu, mut work) = (self.gpu(), None::<Work>);
        let mut count = Count::new(self, limit);
        for tick in 0..(self.seconds / TICK_S) as u64 {
            let t = tick as f64 * TICK_S;
            let now = start + Duration::from_secs_f64(t);
            if random.next() < (self.load)(t) * self.capacity() * TICK_S {
                let deadline = now + Duration::from_secs(1);
                let _ = queue.push(Waiting { what: (), rows: 1, arrived: now, deadline, tries: 0 });
            }
            let luck = work.as_ref().map_or(1.0, |w| w.luck);
            let full = work.as_ref().map(|w| w.batch.rows as f64 / most as f64);
            let speed = full.map_or(1.0, |full| 1.0 - LOST_LEAST - (LOST_FULL - LOST_LEAST) * full);
            let before = gpu.done_s;
            let advanced = gpu.tick(!guard.is_closed(), speed, luck);
            count.tick(t, gpu.done_s - before, &guard);
            if let Some(at) = &mut work {
                at.left_s -= advanced;
            }
            if let Some(done) = work.take_if(|w| w.left_s <= 0.0) {
                let ended = guard.work_ends(queue.latest(None, now), now);
                queue.took(done.batch.rows, now.duration_since(done.batch.sent), ended);
                for arrived in done.arrivals {
                    guard.answered(Some(now.duration_since(arrived)), now);
                    count.answered(t, now.duration_since(arrived));
                }
            }
            let mut began = false;
            if work.is_none()
                && let Some(batch) = queue.next(now, |(), ()| true)
            {
                let rows = batch.len() as u64;
                let left_s = (base_s + row_s * rows as f64) * (0.9 + 0.3 * random.next());
                let arrivals: Vec<Instant> = batch.iter().map(|w| w.arrived).collect();
                let batch = InWork { oldest: arrivals[0], sent: now, rows };
                work = Some(Work { left_s, batch, arrivals, luck: 0.6 + 0.8 * random.next() });
                guard.work_begins(rows, true, now);
                began = true;
            }
            if tick % 20 == 0 || began {
                guard.look(queue.latest(work.as_ref().map(|w| w.batch), now), now);
            }
        }
        count.found()
    }

    fn run_process(&self) -> Found {
        let Server::Process { request_s, gpu_part, stalls_part } = self.server else {
            unreachable!()
        };
        let objective = Objective { quantile: 0.99, ms: self.objective_ms };
        let limit = Duration::from_secs_f64(self.objective_ms / 1e3);
        let (mut passed, mut guard) = (Passed::default(), Guard::new(objective, true));
        let (start, mut random) = (Instant::now(), Random::new(self.seed));
        let (mut gpu, mut open) = (self.gpu(), VecDeque::<(u64, Instant, f64)>::new());
        let mut count = Count::new(self, limit);
        for tick in 0..(self.seconds / TICK_S) as u64 {
            let t = tick as f64 * TICK_S;
            let now = start + Duration::from_secs_f64(t);
            if random.next() < (self.load)(t) * self.capacity() * TICK_S {
                let id = passed.begin(now);
                let stalls = random.next() < stalls_part;
                let stall_s = if stalls { STALL_S } else { 0.0 };
                open.push_back((id, now, stall_s + request_s * (0.7 + 0.6 * random.next())));
                if passed.open() == 1 {
                    guard.work_begins(1, true, now);
                }
                guard.look(passed.latest(now), now);
            }
            let before = gpu.done_s;
            let on_gpu = if open.is_empty() { 0.0 } else { gpu_part };
            let advanced = gpu.tick(!guard.is_closed(), 1.0 - LOST_FULL * on_gpu, 1.0);
            count.tick(t, gpu.done_s - before, &guard);
            let mut done = None;
            if let Some((_, _, left_s)) = open.front_mut() {
                *left_s -= gpu_part * advanced + (1.0 - gpu_part) * TICK_S;
                done = open.pop_front_if(|r| r.2 <= 0.0);
            }
            if let Some((id, arrived, _)) = done {
                passed.end(id, now);
                guard.answer_ends(passed.open() > 0, true, passed.latest(now), now);
                guard.answered(Some(now.duration_since(arrived)), now);
                count.answered(t, now.duration_since(arrived));
            }
            if tick % 20 == 0 {
                guard.look(passed.latest(now), now);
            }
        }
        count.found()
    }
}

/// What is counted after the warm-up.
struct Count {
    warm_s: f64,
    limit: Duration,
    ticks: u64,
    closed: u64,
    attended: u64,
    trained_s: f64,
    requests: u64,
    late: u64,
}

impl Count {
    fn new(world: &World, limit: Duration) -> Self {
        Self {
            warm_s: world.warm_s,
            limit,
            ticks: 0,
            closed: 0,
            attended: 0,
            trained_s: 0.0,
            requests: 0,
            late: 0,
        }
    }

    fn tick(&mut self, t: f64, trained_s: f64, guard: &Guard) {
        if t >= self.warm_s {
            self.ticks += 1;
            self.closed += u64::from(guard.is_closed());
            self.attended += u64::from(guard.attends());
            self.trained_s += trained_s;
        }
    }

    fn answered(&mut self, t: f64, after: Duration) {
        if t >= self.warm_s {
            self.requests += 1;
            if after > self.limit {
                self.late += 1;
            }
        }
    }

    fn found(&self) -> Found {
        let ticks = self.ticks as f64;
        Found {
            late: self.late as f64 / self.requests.max(1) as f64,
            training: self.trained_s / (ticks * TICK_S),
            closed: self.closed as f64 / ticks,
            attended: self.attended as f64 / ticks,
        }
    }
}

/// BERT as CUDA graphs on an H200: 32 requests in 5.6 ms.
const GRAPHS: Server = Server::Batches { base_s: 1.8e-3, row_s: 0.12e-3, most: 32 };
/// An HTTP server bound by its Python process, which uses the GPU for a fiftieth of the time.
const PROCESS: Server = Server::Process { request_s: 0.75e-3, gpu_part: 0.02, stalls_part: 0.0007 };
/// An HTTP server bound by the GPU.
const GPU_SERVER: Server = Server::Process { request_s: 4e-3, gpu_part: 0.9, stalls_part: 0.0 };

/// Limits of training by time, and by launches as groups of small kernels had it.
const BY_TIME: Ahead = Ahead::Seconds(2e-3);
const BY_LAUNCHES: Ahead = Ahead::Launches(48);

fn short_kernels() -> Vec<Kernel> {
    vec![Kernel { seconds: 40e-6, leaves: 0.6 }]
}

/// Mostly short kernels, then six of 1.5 ms that leave a batch little: a large output layer.
fn long_kernels() -> Vec<Kernel> {
    let mut all = vec![Kernel { seconds: 40e-6, leaves: 0.45 }; 1500];
    all.extend([Kernel { seconds: 1.5e-3, leaves: 0.2 }; 6]);
    all
}

/// Loads over time.
fn constant(load: f64) -> impl Fn(f64) -> f64 {
    move |_| load
}

fn bursty(t: f64) -> f64 {
    if t % 1.0 < 0.3 { 0.8 } else { 0.08 }
}

const BURST_S: f64 = 8.0;

fn tenfold(t: f64) -> f64 {
    if t < BURST_S { 0.08 } else { 0.8 }
}

/// Runs a service with the usual objective beside training; counts from `warm_s` on, for 8 s.
fn run(
    (server, kernels, ahead): (Server, Vec<Kernel>, Ahead),
    load: Load<'_>,
    warm_s: f64,
    seed: u64,
) -> Found {
    let objective_ms = if matches!(server, Server::Batches { .. }) { 25.0 } else { 60.0 };
    let seconds = warm_s + 8.0;
    World { server, objective_ms, kernels, ahead, load, seconds, warm_s, seed }.run()
}

/// The mean of some runs, which is printed: the figures of decision 011.
#[expect(clippy::print_stdout, reason = "shown with --nocapture")]
fn mean(name: &str, set: &(Server, Vec<Kernel>, Ahead), load: Load<'_>, warm_s: f64) -> Found {
    let runs: Vec<Found> = (1..=5).map(|seed| run(set.clone(), load, warm_s, seed)).collect();
    let mean = |of: fn(&Found) -> f64| runs.iter().map(of).sum::<f64>() / runs.len() as f64;
    let found = Found {
        late: mean(|f| f.late),
        training: mean(|f| f.training),
        closed: mean(|f| f.closed),
        attended: mean(|f| f.attended),
    };
    println!("{name}: {found:.3?}");
    found
}

#[test]
fn at_light_load_the_gate_stays_open() {
    for (load, least) in [(0.05, 0.95), (0.2, 0.86)] {
        for seed in 1..=3 {
            let found = run((GRAPHS, short_kernels(), BY_TIME), &constant(load), 4.0, seed);
            assert!(found.late <= 0.005, "load {load}, seed {seed}: {found:?}");
            assert!(found.closed <= 0.02, "load {load}, seed {seed}: {found:?}");
            assert!(found.training >= least, "load {load}, seed {seed}: {found:?}");
        }
    }
}

#[test]
fn the_objective_is_kept_at_any_load() {
    // Training gets at least what the service leaves, less what closing the gate costs.
    let constant = [(0.5, 0.5), (0.8, 0.15)].map(|(at, least)| (constant(at), least));
    for seed in 1..=3 {
        for (load, least) in &constant {
            let found = run((GRAPHS, short_kernels(), BY_TIME), load, 4.0, seed);
            assert!(found.late <= 0.005 && found.training >= *least, "seed {seed}: {found:?}");
        }
        let found = run((GRAPHS, short_kernels(), BY_TIME), &bursty, 4.0, seed);
        assert!(found.late <= 0.005 && found.training >= 0.65, "bursty, seed {seed}: {found:?}");
    }
}

#[test]
fn a_burst_is_answered_in_time_from_its_first_request_on() {
    for kernels in [short_kernels(), long_kernels()] {
        let found = mean("tenfold burst", &(GRAPHS, kernels, BY_TIME), &tenfold, BURST_S);
        assert!(found.late <= 0.005, "{found:?}");
    }
}

#[test]
fn long_kernels_are_held_back_in_time() {
    let loads: [(&str, Load<'_>, f64, f64); 5] = [
        ("20 %", &constant(0.2), 4.0, 0.75),
        ("50 %", &constant(0.5), 4.0, 0.38),
        ("80 %", &constant(0.8), 4.0, 0.1),
        ("bursts", &bursty, 4.0, 0.6),
        ("tenfold", &tenfold, BURST_S, 0.08),
    ];
    for (name, load, warm_s, least) in loads {
        let set = |ahead| (GRAPHS, long_kernels(), ahead);
        let limited = mean(&format!("{name}, by time"), &set(BY_TIME), load, warm_s);
        assert!(limited.late <= 0.005 && limited.training >= least, "{name}: {limited:?}");
        // With as many of them ahead as of small kernels the gate has to be closed much earlier.
        let free = mean(&format!("{name}, by launches"), &set(BY_LAUNCHES), load, warm_s);
        assert!(limited.training > free.training, "{name}: {limited:?} {free:?}");
    }
}

#[test]
fn the_gate_stays_open_where_it_does_not_help() {
    for load in [0.05, 0.2, 0.5, 0.8] {
        let name = format!("process, {load}");
        let found = mean(&name, &(PROCESS, short_kernels(), BY_TIME), &constant(load), 8.0);
        assert!(found.closed <= 0.02, "load {load}: {found:?}");
    }
    let found = mean("process, bursts", &(PROCESS, short_kernels(), BY_TIME), &bursty, 8.0);
    assert!(found.closed <= 0.02, "{found:?}");
}

#[test]
fn a_server_on_the_gpu_is_still_protected() {
    let set = (GPU_SERVER, short_kernels(), BY_TIME);
    let found = mean("server on the GPU", &set, &constant(0.6), 4.0);
    assert!(found.late <= 0.005 && found.closed > 0.05, "{found:?}");
}
