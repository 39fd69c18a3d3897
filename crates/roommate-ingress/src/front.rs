//! The state that connections, the worker and the machine share. One thread owns it all.

use crate::frame::Ready;
use crate::queue::{Queue, Rules, Waiting};
use crate::spec::Spec;
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
    /// Arrival of the oldest request in work, and when its batch is expected to be done.
    pub(crate) in_work: Cell<Option<(Instant, Instant)>>,
    /// Requests that are being answered, also by a server behind the front.
    pub(crate) open: Cell<usize>,
}

/// Pressure from which on the machine is told at once.
const URGENT_PERMILLE: u32 = 700;

impl Front {
    pub(crate) fn new(spec: Spec) -> Self {
        let rules = Rules {
            max_batch: spec.max_batch.into(),
            fill: spec.fill(),
            objective: spec.objective(),
            most: spec.queue as usize,
        };
        let stats = Stats::new(spec.objective, Instant::now());
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
        let next = self.in_work.get().map_or(now, |(_, done)| done.max(now));
        let waits = queue.oldest().map(|at| next + queue.expected(queue.rules.max_batch) - at);
        let works = self.in_work.get().map(|(at, done)| done.max(now).duration_since(at));
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
