//! What waits for the daemon's thread, bounded whatever tenants and users send.
//!
//! ```text
//!  user ──── call ────▶ queue, refused when full ───┐
//!  watcher ─ exit ────▶ queue, one per process ─────┼──▶ Batch ──▶ Daemon::round
//!  tenant ── message ─▶ slot, its sender waits ─────┘
//! ```
//!
//! - Each connection of a tenant has a slot of its own. Reports merge in it, the last one wins; a
//!   full slot makes the thread that reads the connection wait, so that the tenant is slowed and
//!   not the machine.
//! - A batch holds all exits, some calls, and one message of each tenant in turn: no crowd of
//!   tenants delays a user, and no tenant delays another.

use crate::api::Call;
use crate::api::control::Reply;
use crate::machine::connection::Peer;
use crate::machine::{Heard, Input};
use crate::protocol::{FromTenant, Stepped};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Most messages of one connection that wait.
const MOST_MESSAGES: usize = 64;
/// Most connections of which something waits; more than may be open at a time.
const MOST_SLOTS: usize = 1_200;
/// Most calls of users that wait; further ones are refused at once.
const MOST_CALLS: usize = 256;
/// Most calls in one batch.
const CALLS_A_ROUND: usize = 32;
/// Most messages of tenants in one batch.
const MESSAGES_A_ROUND: usize = 256;

/// The inputs of one round.
#[derive(Default)]
pub(crate) struct Batch {
    /// Messages of tenants, in the order in which they are handled.
    pub(crate) messages: Vec<Input>,
    /// Folders of attempts whose supervisor ended. They are handled after the messages.
    pub(crate) exits: Vec<PathBuf>,
    /// Requests of users.
    pub(crate) calls: Vec<Call>,
    /// Whether the daemon has to end.
    pub(crate) quit: Option<Quit>,
}

/// How the daemon ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Quit {
    /// Whether the jobs are stopped as well.
    pub(crate) stop_jobs: bool,
}

/// Inputs of the daemon's thread that it has not taken yet.
#[derive(Default)]
pub(crate) struct Inbox {
    waiting: Mutex<Waiting>,
    /// Something waits.
    news: Condvar,
    /// A slot has room again.
    room: Condvar,
}

#[derive(Default)]
struct Waiting {
    /// Whether the daemon has ended.
    closed: bool,
    quit: Option<Quit>,
    exits: Vec<PathBuf>,
    calls: VecDeque<Call>,
    /// By number of the connection.
    slots: BTreeMap<u64, Slot>,
    /// The connection that was served last.
    last: u64,
}

impl Inbox {
    /// Passes on a message of one of the machine's threads; waits while the slot of its connection
    /// is full. Returns false once the daemon has ended.
    pub(crate) fn offer(&self, input: Input) -> bool {
        let mut waiting = self.lock();
        while waiting.has_no_room(&input.0) {
            waiting = self.room.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
        if waiting.closed {
            return false;
        }
        match input.0 {
            Heard::Exited(folder) => waiting.exits.push(folder),
            Heard::Gone(id) => waiting.slots.entry(id).or_default().gone = true,
            Heard::Message(peer, message) => {
                waiting.slots.entry(peer.id).or_default().add(peer, message);
            }
        }
        self.news.notify_one();
        true
    }

    /// Passes on a request of a user, or refuses it at once if too many wait. Returns false once
    /// the daemon has ended.
    pub(crate) fn call(&self, call: Call) -> bool {
        let mut waiting = self.lock();
        if waiting.closed {
            return false;
        }
        if waiting.calls.len() >= MOST_CALLS {
            let what = "the daemon is busy: too many requests wait already".into();
            let hint = Some("try again in a moment".into());
            let _ = call.answer.send(Reply::Error { what, hint });
            return true;
        }
        waiting.calls.push_back(call);
        self.news.notify_one();
        true
    }

    /// Asks the daemon to end.
    pub(crate) fn quit(&self, quit: Quit) {
        self.lock().quit = Some(quit);
        self.news.notify_one();
    }

    /// Waits until something has come, or for this long.
    pub(crate) fn wait(&self, most: Duration) {
        let empty = |waiting: &mut Waiting| waiting.is_empty();
        drop(self.news.wait_timeout_while(self.lock(), most, empty));
    }

    /// The inputs of the next round; `speaker` is the connection of the process whose supervisor
    /// ended, if it has one: all that it said comes before its end.
    pub(crate) fn take(&self, speaker: impl Fn(&Path) -> Option<u64>) -> Batch {
        let mut waiting = self.lock();
        let mut messages = Vec::new();
        let exits = std::mem::take(&mut waiting.exits);
        for id in exits.iter().filter_map(|folder| speaker(folder)) {
            while let Some(message) = waiting.next_of(id) {
                messages.push(message);
            }
        }
        for id in waiting.in_turn() {
            messages.extend(waiting.next_of(id));
            waiting.last = id;
        }
        let calls = waiting.calls.len().min(CALLS_A_ROUND);
        let calls = waiting.calls.drain(..calls).collect();
        self.room.notify_all();
        Batch { messages, exits, calls, quit: waiting.quit.take() }
    }

    /// The daemon has ended: nothing is taken any more, and nobody waits.
    pub(crate) fn close(&self) {
        *self.lock() = Waiting { closed: true, ..Waiting::default() };
        self.room.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    fn is_empty(&self) -> bool {
        let quiet = self.quit.is_none() && self.exits.is_empty();
        quiet && self.calls.is_empty() && self.slots.is_empty()
    }

    fn has_no_room(&self, heard: &Heard) -> bool {
        let (id, most) = match heard {
            Heard::Message(peer, _) => (peer.id, MOST_MESSAGES),
            Heard::Gone(id) => (*id, usize::MAX),
            Heard::Exited(_) => return false,
        };
        match self.slots.get(&id) {
            Some(slot) => slot.said.len() >= most,
            None => self.slots.len() >= MOST_SLOTS,
        }
    }

    /// The connections that are served in this round, beginning after the last one served.
    fn in_turn(&self) -> Vec<u64> {
        let after = self.slots.range((Bound::Excluded(self.last), Bound::Unbounded));
        let others = self.slots.range(..=self.last);
        after.chain(others).map(|(id, _)| *id).take(MESSAGES_A_ROUND).collect()
    }

    /// The next message of a connection. Its slot exists while it has something.
    fn next_of(&mut self, id: u64) -> Option<Input> {
        let slot = self.slots.get_mut(&id)?;
        let heard = match slot.said.pop_front() {
            Some((peer, message)) => Heard::Message(peer, message),
            None => Heard::Gone(id),
        };
        if matches!(heard, Heard::Gone(_)) || (slot.said.is_empty() && !slot.gone) {
            self.slots.remove(&id);
        }
        Some(Input(heard))
    }
}

/// What one connection has said.
#[derive(Default)]
struct Slot {
    said: VecDeque<(Peer, FromTenant)>,
    /// Whether the connection was closed after that.
    gone: bool,
}

impl Slot {
    /// Adds a message. Steps and requests are added to those that wait; of other reports only the
    /// last counts.
    /// Stages are entered and left in order.
    fn add(&mut self, peer: Peer, message: FromTenant) {
        match &message {
            FromTenant::Stepped(more) => {
                // Checkpoints and stages do not change what steps mean; other messages do.
                let passes = |m: &FromTenant| {
                    use FromTenant::{Checkpointed, Enter, Leave};
                    matches!(m, Checkpointed(_) | Enter(_) | Leave(_))
                };
                let before = self.said.iter_mut().map(|(_, m)| m).rev().find(|m| !passes(m));
                if let Some(FromTenant::Stepped(steps)) = before {
                    merge(steps, more);
                    return;
                }
            }
            FromTenant::Served(more) => {
                // Counts mean the same whatever was said in between.
                let before = self.said.iter_mut().find_map(|(_, m)| match m {
                    FromTenant::Served(served) => Some(served),
                    _ => None,
                });
                if let Some(served) = before {
                    *served = served.and(more);
                    return;
                }
            }
            FromTenant::Checkpointed(_)
            | FromTenant::Tuned(_)
            | FromTenant::Suspended(_)
            | FromTenant::Resumed(_) => {
                let kind = std::mem::discriminant(&message);
                self.said.retain(|(_, m)| std::mem::discriminant(m) != kind);
            }
            FromTenant::Hello(_) | FromTenant::Enter(_) | FromTenant::Leave(_) => {}
        }
        self.said.push_back((peer, message));
    }
}

/// Adds later steps: times are means over all of them, everything else is as it was last. Steps
/// with another batch size take other times, and replace the earlier ones.
fn merge(steps: &mut Stepped, more: &Stepped) {
    if steps.batch != more.batch {
        *steps = more.clone();
        return;
    }
    let (before, after) = (steps.steps as f64, more.steps as f64);
    let mean = |was: f64, is: f64| {
        if before > 0.0 { (was * before + is * after) / (before + after) } else { is }
    };
    *steps = Stepped {
        steps: steps.steps.saturating_add(more.steps),
        step_s: mean(steps.step_s, more.step_s),
        load_s: steps.load_s.zip(more.load_s).map(|(was, is)| mean(was, is)).or(more.load_s),
        ..more.clone()
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::caller::Caller;
    use crate::api::control::Request;
    use crate::protocol::{Done, Nothing, Served, Stage, Tuned};
    use std::sync::{Arc, mpsc};

    fn stepped(steps: u64, step_s: f64, done: f64) -> FromTenant {
        let (batch, load_s) = (64, Some(step_s / 2.0));
        let (noise_scale, mem_mib, gpu_mib, stages_s) = (None, None, None, None);
        FromTenant::Stepped(Stepped {
            steps,
            done,
            step_s,
            batch,
            load_s,
            noise_scale,
            mem_mib,
            gpu_mib,
            stages_s,
        })
    }

    fn checkpointed(done: f64) -> FromTenant {
        FromTenant::Checkpointed(Done { done })
    }

    fn enter() -> FromTenant {
        FromTenant::Enter(Stage { stage: "load".into() })
    }

    fn say(inbox: &Inbox, peer: &Peer, message: FromTenant) {
        assert!(inbox.offer(Input(Heard::Message(peer.clone(), message))));
    }

    fn nobody(_: &Path) -> Option<u64> {
        None
    }

    /// What one connection said, as it is handled.
    fn heard(inbox: &Inbox) -> Vec<FromTenant> {
        let batches = std::iter::from_fn(|| {
            let batch = inbox.take(nobody);
            (!batch.messages.is_empty()).then_some(batch.messages)
        });
        let messages = batches.flatten().filter_map(|input| match input.0 {
            Heard::Message(_, message) => Some(message),
            _ => None,
        });
        messages.collect()
    }

    #[test]
    fn the_last_report_wins_and_steps_add_up() {
        let (inbox, (peer, _other)) = (Inbox::default(), Peer::pair(1));
        for message in [
            stepped(30, 0.01, 30.0),
            checkpointed(20.0),
            enter(),
            stepped(10, 0.03, 40.0),
            checkpointed(40.0),
            FromTenant::Suspended(Done { done: 40.0 }),
            FromTenant::Resumed(Nothing {}),
            stepped(u64::MAX, 0.01, 50.0),
            stepped(1, 0.01, 51.0),
            FromTenant::Suspended(Done { done: 51.0 }),
        ] {
            say(&inbox, &peer, message);
        }
        let heard = heard(&inbox);
        let FromTenant::Stepped(first) = &heard[0] else { panic!("{heard:?}") };
        assert_eq!((first.steps, first.done), (40, 40.0));
        assert!((first.step_s - 0.015).abs() < 1e-12 && first.load_s == Some(first.step_s / 2.0));
        let FromTenant::Stepped(second) = &heard[4] else { panic!("{heard:?}") };
        assert_eq!((second.steps, second.done), (u64::MAX, 51.0));
        let rest = [1, 2, 3, 5].map(|i| heard[i].clone());
        let suspended = FromTenant::Suspended(Done { done: 51.0 });
        let resumed = FromTenant::Resumed(Nothing {});
        assert_eq!(rest, [enter(), checkpointed(40.0), resumed, suspended]);
        assert_eq!(heard.len(), 6);
    }

    #[test]
    fn no_request_is_lost() {
        let (inbox, (peer, _other)) = (Inbox::default(), Peer::pair(1));
        let served = |requests, pressure_permille| Served {
            window_us: 100_000,
            requests,
            late: requests / 2,
            refused: 0,
            failed: 0,
            p50_us: 1_000,
            p99_us: 2_000,
            worst_us: 3_000,
            pressure_permille,
            queued: 0,
            batch: 1.0,
            busy_permille: 0,
            held_permille: 0,
            ready: true,
        };
        for (requests, pressure) in [(10, 100), (20, 900), (30, 300)] {
            say(&inbox, &peer, FromTenant::Served(served(requests, pressure)));
            say(
                &inbox,
                &peer,
                FromTenant::Tuned(Tuned { batch: 0, pace_permille: 1000, seat: None }),
            );
        }
        let heard = heard(&inbox);
        assert_eq!(heard.len(), 2);
        let FromTenant::Served(all) = &heard[0] else { panic!("{heard:?}") };
        assert_eq!((all.requests, all.late, all.pressure_permille), (60, 30, 900));
    }

    #[test]
    fn steps_of_another_batch_size_are_not_mixed() {
        let (inbox, (peer, _other)) = (Inbox::default(), Peer::pair(1));
        say(&inbox, &peer, stepped(30, 0.01, 30.0));
        let FromTenant::Stepped(more) = stepped(10, 0.03, 50.0) else { unreachable!() };
        let more = FromTenant::Stepped(Stepped { batch: 128, ..more });
        say(&inbox, &peer, more.clone());
        assert_eq!(heard(&inbox), [more]);
    }

    #[test]
    fn two_hundred_floods_stay_bounded_and_users_are_served() {
        let inbox = Arc::new(Inbox::default());
        let peers: Vec<(Peer, _)> = (0..200).map(Peer::pair).collect();
        let floods: Vec<_> = peers
            .iter()
            .map(|(peer, _)| {
                let (inbox, peer) = (Arc::clone(&inbox), peer.clone());
                std::thread::spawn(move || {
                    // Stages do not merge: this is the most that a tenant can leave here.
                    let mut flood =
                        [enter(), stepped(1, 0.01, 1.0), checkpointed(1.0)].into_iter().cycle();
                    while inbox.offer(Input(Heard::Message(peer.clone(), flood.next().unwrap()))) {}
                })
            })
            .collect();
        let mut served = [0_u64; 200];
        for _ in 0..100 {
            let (answer, answered) = mpsc::channel();
            assert!(inbox.call(Call { request: Request::Ps {}, caller: Caller::this(), answer }));
            let waiting: usize = inbox.lock().slots.values().map(|s| s.said.len()).sum();
            assert!(waiting <= 200 * MOST_MESSAGES, "{waiting}");
            let batch = inbox.take(nobody);
            assert_eq!(batch.calls.len(), 1);
            assert!(batch.messages.len() <= MESSAGES_A_ROUND);
            for input in batch.messages {
                let Heard::Message(peer, _) = input.0 else { panic!() };
                served[peer.id as usize] += 1;
            }
            drop(answered);
        }
        assert!(served.iter().all(|n| *n <= 100), "{served:?}");
        inbox.close();
        floods.into_iter().for_each(|f| f.join().unwrap());
        assert!(inbox.lock().slots.is_empty());
    }

    #[test]
    fn tenants_are_served_in_turn() {
        let inbox = Inbox::default();
        let peers: Vec<(Peer, _)> = (0..300).map(Peer::pair).collect();
        for (peer, _) in &peers {
            (0..4).for_each(|_| say(&inbox, peer, enter()));
        }
        let mut served = vec![0; 300];
        for round in 1..=3 {
            for input in inbox.take(nobody).messages {
                let Heard::Message(peer, _) = input.0 else { panic!() };
                served[peer.id as usize] += 1;
            }
            let (least, most) = (served.iter().min().unwrap(), served.iter().max().unwrap());
            assert!(most - least <= 1, "after {round}: {least} to {most}");
        }
        assert_eq!(served.iter().sum::<usize>(), 3 * MESSAGES_A_ROUND);
    }

    #[test]
    fn all_that_a_process_said_comes_before_its_end() {
        let inbox = Inbox::default();
        let ((loud, _a), (other, _b)) = (Peer::pair(1), Peer::pair(2));
        for message in [enter(), stepped(1, 0.01, 1.0), checkpointed(9.0)] {
            say(&inbox, &loud, message.clone());
            say(&inbox, &other, message);
        }
        inbox.offer(Input(Heard::Gone(1)));
        inbox.offer(Input(Heard::Exited("attempt".into())));
        let batch = inbox.take(|folder| (folder.as_os_str() == "attempt").then_some(1));
        assert_eq!(batch.exits, [PathBuf::from("attempt")]);
        let of = |id: u64| {
            let from = |i: &&Input| matches!(&i.0, Heard::Message(p, _) if p.id == id);
            batch.messages.iter().filter(from).count()
        };
        assert_eq!((of(1), of(2)), (3, 1));
        assert!(batch.messages.iter().any(|i| matches!(i.0, Heard::Gone(1))));
    }

    #[test]
    fn calls_above_the_limit_are_refused_at_once() {
        let inbox = Inbox::default();
        let ask = || {
            let (answer, answered) = mpsc::channel();
            assert!(inbox.call(Call { request: Request::Ps {}, caller: Caller::this(), answer }));
            answered
        };
        let kept: Vec<_> = (0..MOST_CALLS).map(|_| ask()).collect();
        let Ok(Reply::Error { what, .. }) = ask().try_recv() else { panic!("not refused") };
        assert!(what.contains("busy"), "{what}");
        assert!(kept.iter().all(|k| k.try_recv().is_err()));
        assert_eq!(inbox.take(nobody).calls.len(), CALLS_A_ROUND);
        ask();
        inbox.quit(Quit { stop_jobs: true });
        assert_eq!(inbox.take(nobody).quit, Some(Quit { stop_jobs: true }));
        inbox.close();
        let (answer, answered) = mpsc::channel();
        assert!(!inbox.call(Call { request: Request::Ps {}, caller: Caller::this(), answer }));
        assert!(answered.recv().is_err());
    }
}
