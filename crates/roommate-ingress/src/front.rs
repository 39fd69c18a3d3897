//! The state that connections, the worker and the machine share. One thread owns it all.

use crate::frame::Ready;
use crate::gate::Gate;
use crate::guard::{Done, Guard};
use crate::hold::Latest;
use crate::passed::Passed;
use crate::queue::{InWork, Queue, Rules, Waiting};
use crate::spec::{Server, Spec};
use crate::stats::{End, Stats};
use crate::tensor::{Infer, Tensor};
use serde_json::value::RawValue;
use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, oneshot};

/// Whether the worker can answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// It has not answered yet: requests are refused.
    Starting,
    Ready,
    /// It died, and another one is started: requests wait.
    Restarting,
    /// The service ends: requests are refused.
    Draining,
}

/// A request in the queue.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) content: Content,
    pub(crate) reply: oneshot::Sender<Result<Answer, Refusal>>,
}

#[derive(Debug)]
pub(crate) enum Content {
    Tensors(Infer),
    Json(Box<RawValue>),
}

#[derive(Debug)]
pub(crate) enum Answer {
    Tensors(Infer, Vec<Tensor>),
    Json(Box<RawValue>),
}

/// Why a request is not answered.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) status: u16,
    pub(crate) end: End,
    pub(crate) what: String,
    pub(crate) retry_after_s: Option<u64>,
}

impl Refusal {
    pub(crate) fn later(end: End, status: u16, what: impl Into<String>, after_s: u64) -> Self {
        Self { status, end, what: what.into(), retry_after_s: Some(after_s) }
    }

    pub(crate) fn wrong(status: u16, what: impl Into<String>) -> Self {
        Self { status, end: End::Wrong, what: what.into(), retry_after_s: None }
    }
}

/// What all parts of the front share.
pub(crate) struct Front {
    pub(crate) spec: Spec,
    pub(crate) queue: RefCell<Queue<Request>>,
    pub(crate) stats: RefCell<Stats>,
    pub(crate) phase: Cell<Phase>,
    /// Whether the machine suspended the service.
    pub(crate) suspended: Cell<bool>,
    /// What the worker said of itself.
    pub(crate) ready: RefCell<Ready>,
    /// The last orders of the machine, for the worker.
    pub(crate) tune: RefCell<Option<Box<RawValue>>>,
    /// A request arrived, orders changed, or the service ends.
    pub(crate) changed: Notify,
    /// The pressure is high: the machine is told at once.
    pub(crate) urgent: Notify,
    /// The batch in work.
    pub(crate) in_work: Cell<Option<InWork>>,
    /// Requests that are being answered, also by a server behind the front.
    pub(crate) open: Cell<usize>,
    /// Requests that were passed on to a server behind the front.
    pub(crate) passed: RefCell<Passed>,
    /// When roommates are held back, and how.
    guard: RefCell<Guard>,
    pub(crate) gate: RefCell<Gate>,
    /// When the last request came.
    pub(crate) asked: Cell<Option<Instant>>,
}

/// After this time without a request roommates need not be ready to be held back: that costs them a
/// little.
const ATTENDS_FOR: Duration = Duration::from_secs(2);
/// Pressure from which on the machine is told at once.
const URGENT_PERMILLE: u32 = 700;

impl Front {
    pub(crate) fn new(spec: Spec) -> Self {
        let rules = Rules {
            max_batch: spec.max_batch.into(),
            fill: spec.fill(),
            roommates: false,
            objective: spec.objective(),
            most: spec.queue as usize,
        };
        let stats = Stats::new(spec.objective, Instant::now());
        let gate = Gate::given();
        let guard = RefCell::new(Guard::new(spec.objective, gate.is_there()));
        Self {
            spec,
            queue: RefCell::new(Queue::new(rules)),
            stats: RefCell::new(stats),
            phase: Cell::new(Phase::Starting),
            suspended: Cell::new(false),
            ready: RefCell::default(),
            tune: RefCell::default(),
            changed: Notify::new(),
            urgent: Notify::new(),
            in_work: Cell::new(None),
            open: Cell::new(0),
            passed: RefCell::default(),
            guard,
            gate: RefCell::new(gate),
            asked: Cell::new(None),
        }
    }

    /// What the latest request is expected to need beside roommates.
    fn latest(&self, now: Instant) -> Latest {
        match self.spec.server {
            Server::Sdk {} => self.queue.borrow().latest(self.in_work.get(), now),
            Server::Http { .. } => self.passed.borrow().latest(now),
        }
    }

    /// Opens or closes the gate.
    pub(crate) fn look_at_gate(&self) {
        let now = Instant::now();
        let mut gate = self.gate.borrow_mut();
        let asked = self.asked.get().is_some_and(|at| now.duration_since(at) < ATTENDS_FOR);
        let mut guard = self.guard.borrow_mut();
        gate.attend(asked && self.is_ready() && guard.attends(), now);
        gate.set(guard.look(self.latest(now), now), now);
    }

    /// A batch is given to the worker.
    pub(crate) fn work_begins(&self, work: InWork) {
        self.in_work.set(Some(work));
        self.begins(work.rows, work.sent);
        self.look_at_gate();
    }

    fn begins(&self, size: u64, now: Instant) {
        let roommates = self.queue.borrow().rules.roommates;
        self.guard.borrow_mut().work_begins(size, roommates, now);
    }

    /// The batch in work was answered. What is known of it.
    pub(crate) fn work_ends(&self) -> Done {
        self.in_work.set(None);
        let now = Instant::now();
        let latest = self.latest(now);
        let mut guard = self.guard.borrow_mut();
        let done = guard.work_ends(latest, now);
        self.gate.borrow_mut().set(guard.is_closed(), now);
        done
    }

    /// The worker died, perhaps with a batch in work.
    pub(crate) fn work_is_lost(&self) {
        self.in_work.set(None);
        let now = Instant::now();
        let latest = self.latest(now);
        let closed = self.guard.borrow_mut().look_after(latest, now);
        self.gate.borrow_mut().set(closed, now);
    }

    /// A request is passed on to the server behind the front; its number.
    pub(crate) fn pass_begins(&self, arrived: Instant) -> u64 {
        let mut passed = self.passed.borrow_mut();
        let id = passed.begin(arrived);
        let is_first = passed.open() == 1;
        drop(passed);
        if is_first {
            self.begins(1, Instant::now());
        }
        self.look_at_gate();
        id
    }

    /// The server behind the front has answered a request, or will not.
    pub(crate) fn pass_ends(&self, id: u64) {
        let now = Instant::now();
        self.passed.borrow_mut().end(id, now);
        let (has_more, latest) = (self.passed.borrow().open() > 0, self.latest(now));
        let roommates = self.queue.borrow().rules.roommates;
        let mut guard = self.guard.borrow_mut();
        guard.answer_ends(has_more, roommates, latest, now);
        self.gate.borrow_mut().set(guard.is_closed(), now);
    }

    /// Whether requests wait or are being answered.
    pub(crate) fn is_busy(&self) -> bool {
        self.open.get() > 0
    }

    /// A request ended; every one is counted here.
    pub(crate) fn ended(&self, end: End, status: u16, latency: Duration) {
        self.stats.borrow_mut().ended(end, status, latency);
        match end {
            End::Wrong | End::Refused => {}
            End::Answered | End::GivenUp | End::Failed => {
                let after = (end == End::Answered).then_some(latency);
                self.guard.borrow_mut().answered(after, Instant::now());
            }
        }
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.phase.get() == Phase::Ready && !self.suspended.get()
    }

    /// Why no request is taken now.
    pub(crate) fn closed(&self) -> Option<Refusal> {
        let what = match self.phase.get() {
            Phase::Starting => "the model is being loaded",
            Phase::Draining => "the service ends",
            _ if self.suspended.get() => "the service is suspended",
            _ => return None,
        };
        Some(Refusal::later(End::Refused, 503, what, 1))
    }

    /// Queues a request and waits for its answer.
    pub(crate) async fn ask(
        &self,
        content: Content,
        rows: u64,
        arrived: Instant,
    ) -> Result<Answer, Refusal> {
        if let Some(refusal) = self.closed() {
            return Err(refusal);
        }
        let asked = match &content {
            Content::Tensors(infer) => infer.timeout_us.map(Duration::from_micros),
            Content::Json(_) => None,
        };
        let patience = self.spec.patience();
        let deadline = arrived + asked.map_or(patience, |asked| asked.min(patience));
        let (reply, answer) = oneshot::channel();
        let request = Request { content, reply };
        let waiting = Waiting { what: request, rows, arrived, deadline, tries: 0 };
        if self.queue.borrow_mut().push(waiting).is_err() {
            let after = self.queue.borrow().room_in_s();
            return Err(Refusal::later(End::Refused, 429, "the queue is full", after));
        }
        self.changed.notify_one();
        let late = || Refusal::later(End::GivenUp, 503, "not answered in time", 1);
        match tokio::time::timeout_at(deadline.into(), answer).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) | Err(_) => Err(late()),
        }
    }

    /// Refuses requests that nobody waits for, or that cannot be answered in time.
    pub(crate) fn give_up(&self) {
        let gone = self.queue.borrow_mut().give_up(Instant::now(), |r| r.reply.is_closed());
        for request in gone {
            let refusal = if request.tries > 0 {
                Refusal::later(End::GivenUp, 503, "the worker died while it answered this", 1)
            } else {
                Refusal::later(End::GivenUp, 503, "cannot be answered in time", 1)
            };
            let _ = request.what.reply.send(Err(refusal));
        }
    }

    /// Accounts for requests that wait and are in work.
    pub(crate) fn press(&self) {
        let now = Instant::now();
        let queue = self.queue.borrow();
        let work = self.in_work.get();
        let done = work.map(|w| (w.sent + queue.expected(w.rows)).max(now));
        let waits = queue
            .oldest()
            .map(|at| done.unwrap_or(now) + queue.expected(queue.rules.max_batch) - at);
        let works = work.zip(done).map(|(w, done)| done.duration_since(w.oldest));
        let Some(longest) = waits.into_iter().chain(works).max() else { return };
        let permille = 1000.0 * longest.as_secs_f64() / self.spec.objective().as_secs_f64();
        let permille = permille.min(1e6) as u32;
        self.stats.borrow_mut().pressed(permille);
        if permille >= URGENT_PERMILLE {
            self.urgent.notify_one();
        }
    }

    /// Begins to end the service.
    pub(crate) fn drain(&self) {
        self.phase.set(Phase::Draining);
        self.changed.notify_one();
    }

    /// Whether nothing is left to answer.
    pub(crate) fn is_idle(&self) -> bool {
        self.queue.borrow().is_empty() && self.in_work.get().is_none() && self.open.get() == 0
    }
}
