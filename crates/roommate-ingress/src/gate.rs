//! The gate in front of the roommates' kernels, which this service opens and closes.

use roommate_lease::Leases;
use std::path::Path;
use std::time::{Duration, Instant};

/// The variable by which the machine says which place of which lease file is this service's:
/// `SLOT:FILE`.
pub(crate) const VARIABLE: &str = "ROOMMATE_HOLDS";

/// For how long the gate is closed at a time; it is renewed as long as it is needed. If this
/// process dies, the gate is open after this time.
const LEASE: Duration = Duration::from_millis(50);
const RENEW: Duration = Duration::from_millis(10);
/// For how long roommates expect the gate to be closed any time.
const ATTEND: Duration = Duration::from_secs(3);
const ATTEND_AGAIN: Duration = Duration::from_secs(1);

/// The gate, if the machine gave the service one.
pub(crate) struct Gate {
    held: Option<(Leases, usize)>,
    /// When it was closed, and when that was last renewed.
    closed: Option<(Instant, Instant)>,
    attended: Option<Instant>,
    /// Time for which it was closed and that is not reported yet.
    unreported: Duration,
}

impl Gate {
    /// The gate that the machine gave this process.
    pub(crate) fn given() -> Self {
        let value = std::env::var(VARIABLE).unwrap_or_default();
        let held = value.split_once(':').and_then(|(slot, file)| {
            let slot = slot.parse().ok()?;
            match Leases::open(Path::new(file)) {
                Ok(leases) => leases.holder(slot).is_some().then_some((leases, slot)),
                Err(e) => {
                    crate::say(&format!("roommates cannot be held back: {file}: {e}"));
                    None
                }
            }
        });
        Self { held, closed: None, attended: None, unreported: Duration::ZERO }
    }

    pub(crate) fn is_there(&self) -> bool {
        self.held.is_some()
    }

    /// Closes or opens it.
    pub(crate) fn set(&mut self, close: bool, now: Instant) {
        let Some(holder) = self.held.as_ref().and_then(|(leases, slot)| leases.holder(*slot))
        else {
            return;
        };
        match (close, self.closed) {
            (true, Some((_, renewed))) if now.duration_since(renewed) < RENEW => {}
            (true, closed) => {
                holder.close(LEASE);
                self.closed = Some((closed.map_or(now, |(since, _)| since), now));
            }
            (false, Some((since, _))) => {
                holder.open();
                self.unreported += now.duration_since(since);
                self.closed = None;
            }
            (false, None) => {}
        }
    }

    /// Tells roommates that the gate may be closed any time, or that it will not be.
    pub(crate) fn attend(&mut self, serves: bool, now: Instant) {
        let Some(holder) = self.held.as_ref().and_then(|(leases, slot)| leases.holder(*slot))
        else {
            return;
        };
        if !serves {
            if self.attended.take().is_some() {
                holder.leave();
            }
        } else if self.attended.is_none_or(|at| now.duration_since(at) >= ATTEND_AGAIN) {
            holder.attend(ATTEND);
            self.attended = Some(now);
        }
    }

    /// For how long it was closed since this was asked last.
    pub(crate) fn take_held(&mut self, now: Instant) -> Duration {
        if let Some((since, _)) = &mut self.closed {
            self.unreported += now.duration_since(*since);
            *since = now;
        }
        std::mem::take(&mut self.unreported)
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        if let Some(holder) = self.held.as_ref().and_then(|(leases, slot)| leases.holder(*slot)) {
            holder.leave();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use roommate_lease::now_ns;

    #[test]
    fn what_is_closed_is_renewed_and_counted() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("gate");
        let other = Leases::create(&file).unwrap();
        let held = Some((Leases::open(&file).unwrap(), 3));
        let (closed, attended, unreported) = (None, None, Duration::ZERO);
        let mut gate = Gate { held, closed, attended, unreported };
        let at = Instant::now();
        gate.attend(true, at);
        assert!(other.is_attended(now_ns()) && !other.is_closed(now_ns()));
        gate.set(true, at);
        assert!(other.is_closed(now_ns()));
        // Not renewed, it is open after its lease.
        assert!(!other.is_closed(now_ns() + LEASE.as_nanos() as u64 + 1));
        gate.set(true, at + RENEW);
        assert_eq!(gate.take_held(at + RENEW), RENEW);
        gate.set(false, at + RENEW * 3);
        assert_eq!(gate.take_held(at + RENEW * 9), RENEW * 2);
        assert!(!other.is_closed(now_ns()));
        gate.set(true, at);
        drop(gate);
        assert!(!other.is_closed(now_ns()) && !other.is_attended(now_ns()));
    }
}
