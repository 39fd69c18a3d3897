//! Requests that a server behind the front answers, in its own way. Pure: the time is given.

use crate::hold::{Latest, Needs};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Requests that a server behind the front answers, in its own way.
#[derive(Debug, Default)]
pub(crate) struct Passed {
    next: u64,
    /// Arrivals of those that are not answered, in order.
    open: BTreeMap<u64, Instant>,
    /// The last answer, or when the server was last idle.
    last: Option<Instant>,
    /// Mean time between two answers while there are requests.
    between_s: f64,
}

impl Passed {
    pub(crate) fn begin(&mut self, arrived: Instant) -> u64 {
        if self.open.is_empty() {
            self.last = Some(arrived);
        }
        self.next += 1;
        self.open.insert(self.next, arrived);
        self.next
    }

    pub(crate) fn end(&mut self, id: u64, now: Instant) {
        if self.open.remove(&id).is_none() {
            return;
        }
        let passed = self.last.map_or(0.0, |last| now.duration_since(last).as_secs_f64());
        self.last = Some(now);
        self.between_s =
            if self.between_s > 0.0 { 0.95 * self.between_s + 0.05 * passed } else { passed };
    }

    /// Requests that are not answered.
    pub(crate) fn open(&self) -> usize {
        self.open.len()
    }

    /// What the latest request is expected to need: the oldest as long as it waited and a while
    /// longer, the newest until all before it are answered.
    pub(crate) fn latest(&self, now: Instant) -> Latest {
        let Some((_, oldest)) = self.open.first_key_value() else { return Latest::None };
        let between = Duration::from_secs_f64(self.between_s);
        let newest = between.mul_f64(self.open.len() as f64);
        let held = (now.duration_since(*oldest) + between).max(newest);
        Latest::InWork(Needs { held, free: None, left: between })
    }
}
