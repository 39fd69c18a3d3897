//! Connections that are not known to be a tenant's yet, and the number of those that are.

use crate::machine::connection::hang_up;
use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Most connections that are not admitted yet.
const MOST_STRANGERS: usize = 64;
/// Most connections of tenants; each token has one.
const MOST_TENANTS: usize = 1_000;
/// How long a connection has in any case to say hello, before it makes room for another one.
const LEAST_STAY: Duration = Duration::from_millis(100);

/// Who is connected.
#[derive(Debug, Default)]
pub(super) struct Lobby(Mutex<Present>);

#[derive(Debug, Default)]
struct Present {
    /// Oldest first.
    strangers: Vec<Stranger>,
    tenants: BTreeSet<u64>,
}

#[derive(Debug)]
struct Stranger {
    id: u64,
    stream: Arc<UnixStream>,
    came: Instant,
    /// Whether it said hello, so that the machine is about to decide on it.
    spoke: bool,
}

/// What became of a connection whose token the machine knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It counts as a tenant's.
    Admitted,
    /// There is no room.
    Full,
    /// It was closed meanwhile.
    Gone,
}

impl Lobby {
    /// A new connection; the oldest one that is silent is closed if there are too many. False if
    /// none is silent, and so there is no room. Fails with a time to wait if the oldest one has not
    /// had its time yet.
    pub(super) fn come(
        &self,
        id: u64,
        stream: &Arc<UnixStream>,
        now: Instant,
    ) -> Result<bool, Duration> {
        let mut present = self.lock();
        if present.strangers.len() >= MOST_STRANGERS {
            let Some(oldest) = present.strangers.iter().position(|s| !s.spoke) else {
                return Ok(false);
            };
            let stay = (present.strangers[oldest].came + LEAST_STAY).saturating_duration_since(now);
            if stay > Duration::ZERO {
                return Err(stay);
            }
            hang_up(&present.strangers.remove(oldest).stream);
        }
        let stream = Arc::clone(stream);
        present.strangers.push(Stranger { id, stream, came: now, spoke: false });
        Ok(true)
    }

    /// Closes the oldest silent connection, if it has had its time.
    pub(super) fn make_room(&self, now: Instant) {
        let mut present = self.lock();
        let stayed = |s: &Stranger| !s.spoke && now.duration_since(s.came) >= LEAST_STAY;
        if let Some(oldest) = present.strangers.iter().position(stayed) {
            hang_up(&present.strangers.remove(oldest).stream);
        }
    }

    /// A connection said hello.
    pub(super) fn spoke(&self, id: u64) {
        let mut present = self.lock();
        if let Some(stranger) = present.strangers.iter_mut().find(|s| s.id == id) {
            stranger.spoke = true;
        }
    }

    /// The machine knows the token of a connection.
    pub(super) fn admit(&self, id: u64) -> Outcome {
        let mut present = self.lock();
        if present.tenants.contains(&id) {
            return Outcome::Admitted;
        }
        let Some(at) = present.strangers.iter().position(|s| s.id == id) else {
            return Outcome::Gone;
        };
        if present.tenants.len() >= MOST_TENANTS {
            return Outcome::Full;
        }
        present.strangers.remove(at);
        present.tenants.insert(id);
        Outcome::Admitted
    }

    /// A connection is closed.
    pub(super) fn leave(&self, id: u64) {
        let mut present = self.lock();
        present.strangers.retain(|s| s.id != id);
        present.tenants.remove(&id);
    }

    fn lock(&self) -> MutexGuard<'_, Present> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    fn stream() -> (Arc<UnixStream>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        (Arc::new(ours), theirs)
    }

    fn is_closed(theirs: &UnixStream) -> bool {
        let mut theirs = theirs;
        matches!(theirs.read(&mut [0]), Ok(0))
    }

    #[test]
    fn the_oldest_silent_stranger_makes_room() {
        let (lobby, now) = (Lobby::default(), Instant::now());
        let streams: Vec<_> = (0..=MOST_STRANGERS).map(|_| stream()).collect();
        for (id, (ours, _)) in streams.iter().enumerate().take(MOST_STRANGERS) {
            assert_eq!(lobby.come(id as u64, ours, now), Ok(true));
        }
        lobby.spoke(0);
        let (newest, id) = (&streams[MOST_STRANGERS].0, MOST_STRANGERS as u64);
        // Everyone has a moment to say hello.
        assert_eq!(lobby.come(id, newest, now), Err(LEAST_STAY));
        assert_eq!(lobby.come(id, newest, now + LEAST_STAY), Ok(true));
        assert_eq!([0, 1, 2].map(|n| is_closed(&streams[n].1)), [false, true, false]);
        assert_eq!(lobby.admit(1), Outcome::Gone);
        assert_eq!([lobby.admit(0), lobby.admit(0)], [Outcome::Admitted; 2]);
        lobby.leave(0);
        assert_eq!(lobby.admit(0), Outcome::Gone);
        lobby.make_room(now + LEAST_STAY);
        assert_eq!([2, 3].map(|n| is_closed(&streams[n].1)), [true, false]);
    }

    #[test]
    fn those_who_said_hello_are_not_pushed_out() {
        let (lobby, now) = (Lobby::default(), Instant::now());
        let (ours, theirs) = stream();
        for id in 0..MOST_STRANGERS as u64 {
            assert_eq!(lobby.come(id, &ours, now), Ok(true));
            lobby.spoke(id);
        }
        assert_eq!(lobby.come(99, &ours, now + LEAST_STAY), Ok(false));
        assert_eq!(lobby.admit(5), Outcome::Admitted);
        assert_eq!(lobby.come(99, &ours, now), Ok(true));
        assert!(!is_closed(&theirs));
    }

    #[test]
    fn tenants_have_a_limit_of_their_own() {
        let (lobby, now) = (Lobby::default(), Instant::now());
        let (ours, _theirs) = stream();
        let enter = |id| {
            assert_eq!(lobby.come(id, &ours, now), Ok(true));
            lobby.admit(id)
        };
        let most = MOST_TENANTS as u64;
        assert!((0..most).all(|id| enter(id) == Outcome::Admitted));
        assert_eq!(enter(most), Outcome::Full);
        lobby.leave(7);
        assert_eq!(lobby.admit(most), Outcome::Admitted);
    }
}
