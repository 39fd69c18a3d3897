//! Limits of MPS clients that a client cannot lift.
//!
//! The variables of a client's environment can only lower the limit that the control has set, and a
//! process can remove its variables. The control has one limit at a time, for all clients that
//! connect from then on; clients that are connected keep theirs. So tenants with different limits
//! are let in one after another:
//!
//! ```text
//!  admit ──▶ entering ─── its first process connected, SETTLE is over ──▶ inside
//!            the limit in force is its own            it is the smallest of all inside
//! ```
//!
//! - Tenants with equal limits do not wait for each other.
//! - A tenant that does not connect keeps others waiting for `PATIENCE`. It may still connect with
//!   its own limit until `GIVE_UP` is over, whenever nobody else is being let in.
//! - A process that connects while the control allows more or less than its tenant may use is
//!   found out and told of ([`Found`]): nothing but its variables lowers its limit.

use std::time::{Duration, Instant};

/// The most that a client may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limit {
    /// Part of the SMs.
    pub(crate) sm_permille: u16,
    /// Memory; `None` = all of the GPU's.
    pub(crate) mem_mib: Option<u32>,
}

impl Limit {
    /// The whole GPU.
    pub(crate) const WHOLE: Self = Self { sm_permille: 1000, mem_mib: None };

    /// The smaller one of each.
    fn min(self, other: Self) -> Self {
        let mems = self.mem_mib.into_iter().chain(other.mem_mib);
        Self { sm_permille: self.sm_permille.min(other.sm_permille), mem_mib: mems.min() }
    }

    /// Whether it allows nothing that `other` does not allow.
    fn is_within(self, other: Self) -> bool {
        self.min(other) == self
    }
}

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.1}% of the SMs", f64::from(self.sm_permille) / 10.0)?;
        self.mem_mib.map_or(Ok(()), |mib| write!(f, " and {mib} MiB"))
    }
}

/// A process that connected with another limit than its tenant's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) tenant: u32,
    pub(crate) pid: u32,
    /// What its tenant may use, and what the control allowed when it connected.
    pub(crate) may: Limit,
    pub(crate) had: Limit,
}

impl std::fmt::Display for Found {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { pid, may, had, .. } = self;
        if had.is_within(*may) {
            write!(f, "its process {pid} connected late and is limited to {had}, not {may}")
        } else {
            write!(
                f,
                "its process {pid} connected while another job was let in: MPS allows it {had}, \
                 and only its own variables hold it to {may}"
            )
        }
    }
}

/// A tenant that may connect.
#[derive(Clone, Copy, Debug)]
struct Guest {
    tenant: u32,
    /// The user whose processes they are.
    uid: u32,
    limit: Limit,
    /// Until when others wait for it, and until when the control may have its limit.
    patience: Instant,
    give_up: Instant,
    /// Until when more of its processes get its limit, once one has connected.
    settled: Option<Instant>,
}

impl Guest {
    fn is_entering(&self, now: Instant) -> bool {
        now < self.settled.unwrap_or(self.give_up)
    }
}

/// A connected process.
#[derive(Clone, Copy, Debug)]
struct Client {
    pid: u32,
    /// The limit that was in force when it connected; `None` = unknown.
    under: Option<Limit>,
    /// Whether its tenant was found.
    known: bool,
}

/// The limits of the tenants of one GPU.
#[derive(Debug, Default)]
pub(crate) struct Limits {
    /// Tenants that were let in, in that order.
    guests: Vec<Guest>,
    /// What the control has set; `None` = unknown.
    set: Option<Limit>,
    /// `None` before they were listed for the first time.
    clients: Option<Vec<Client>>,
    /// When a tenant that waits asked last.
    waits: Option<Instant>,
}

/// How long others wait for a tenant to connect: importing a framework takes 10 to 25 s.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long a tenant may take to connect: some load their data before they touch the GPU.
const GIVE_UP: Duration = Duration::from_secs(600);
/// A tenant that waits asks again within this time.
const ASKS_WITHIN: Duration = Duration::from_secs(1);
/// Processes of one tenant connect together.
const SETTLE: Duration = Duration::from_secs(5);

impl Limits {
    /// Whether a tenant of this user can be a client: a server serves one user.
    pub(crate) fn serves(&self, tenant: u32, uid: u32) -> bool {
        self.guests.iter().all(|g| g.tenant == tenant || g.uid == uid)
    }

    pub(crate) fn has(&self, tenant: u32) -> bool {
        self.of(tenant).is_some()
    }

    /// What the tenant was let in with.
    pub(crate) fn of(&self, tenant: u32) -> Option<Limit> {
        self.guests.iter().find(|g| g.tenant == tenant).map(|g| g.limit)
    }

    /// Lets a tenant in, unless others are just being let in with another limit. True when the
    /// control has its limit, so that its process may be started.
    pub(crate) fn admit(&mut self, tenant: u32, uid: u32, limit: Limit, now: Instant) -> bool {
        let in_the_way = |g: &Guest| {
            g.tenant != tenant && g.limit != limit && g.is_entering(now) && now < g.patience
        };
        let is_in = self.guests.iter().any(|g| g.tenant == tenant && g.limit == limit);
        if !is_in {
            if self.guests.iter().any(in_the_way) {
                self.waits = Some(now);
                return false;
            }
            self.leave(tenant);
            let (patience, give_up) = (now + PATIENCE, now + GIVE_UP);
            self.guests.push(Guest { tenant, uid, limit, patience, give_up, settled: None });
        }
        self.set == Some(limit) && self.wanted(now).is_none()
    }

    /// A tenant whose process runs already. Nobody waits for it.
    pub(crate) fn adopt(&mut self, tenant: u32, uid: u32, limit: Limit, now: Instant) {
        if !self.has(tenant) {
            let give_up = now + GIVE_UP;
            self.guests.push(Guest { tenant, uid, limit, patience: now, give_up, settled: None });
        }
    }

    /// The tenant is gone.
    pub(crate) fn leave(&mut self, tenant: u32) {
        self.guests.retain(|g| g.tenant != tenant);
    }

    /// The limit that the control is to have.
    fn in_force(&self, now: Instant) -> Limit {
        let entering = self.guests.iter().rev().find(|g| g.is_entering(now));
        let all = || self.guests.iter().map(|g| g.limit).reduce(Limit::min);
        entering.map(|g| g.limit).or_else(all).unwrap_or(Limit::WHOLE)
    }

    /// The limit to set at the control, if it has another one.
    pub(crate) fn wanted(&self, now: Instant) -> Option<Limit> {
        Some(self.in_force(now)).filter(|limit| self.set != Some(*limit))
    }

    /// The control has this limit now; `None` = unknown.
    pub(crate) fn was_set(&mut self, limit: Option<Limit>) {
        self.set = limit;
    }

    /// Whether a tenant waits: for the control, or for another to connect.
    pub(crate) fn is_awaited(&self, now: Instant) -> bool {
        let asked = |at: Instant| now.duration_since(at) < ASKS_WITHIN;
        self.wanted(now).is_some() || self.waits.is_some_and(asked)
    }

    /// These processes are connected. Listed before the control's limit is changed.
    pub(crate) fn listed(&mut self, pids: &[u32]) {
        let first = self.clients.is_none();
        let clients = self.clients.get_or_insert_default();
        clients.retain(|c| pids.contains(&c.pid));
        for pid in pids {
            if clients.iter().all(|c| c.pid != *pid) {
                let under = self.set.filter(|_| !first);
                clients.push(Client { pid: *pid, under, known: false });
            }
        }
    }

    /// Nobody is connected any more, and a new control has no limits.
    pub(crate) fn begun_anew(&mut self) {
        (self.clients, self.set) = (Some(Vec::new()), Some(Limit::WHOLE));
    }

    /// Finds the tenants of new clients; `owner` names the tenant of a process.
    pub(crate) fn attend(
        &mut self,
        now: Instant,
        owner: &dyn Fn(u32) -> Option<u32>,
    ) -> Vec<Found> {
        let mut found = Vec::new();
        for client in self.clients.iter_mut().flatten().filter(|c| !c.known) {
            let Some(tenant) = owner(client.pid) else { continue };
            let Some(guest) = self.guests.iter_mut().find(|g| g.tenant == tenant) else { continue };
            client.known = true;
            guest.settled.get_or_insert(now + SETTLE);
            if let Some(had) = client.under.filter(|had| *had != guest.limit) {
                found.push(Found { tenant, pid: client.pid, may: guest.limit, had });
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: u32 = 1000;

    fn limit(sm_permille: u16, mem_mib: u32) -> Limit {
        Limit { sm_permille, mem_mib: (mem_mib > 0).then_some(mem_mib) }
    }

    /// Limits with a control that obeys at once, and a clock.
    struct Door {
        limits: Limits,
        now: Instant,
        pids: Vec<u32>,
    }

    impl Door {
        fn new() -> Self {
            let mut limits = Limits::default();
            limits.begun_anew();
            Self { limits, now: Instant::now(), pids: Vec::new() }
        }

        /// What the thread of the control does.
        fn turn(&mut self) {
            self.limits.listed(&self.pids);
            if let Some(wanted) = self.limits.wanted(self.now) {
                self.limits.was_set(Some(wanted));
            }
        }

        fn admits(&mut self, tenant: u32, its: Limit) -> bool {
            self.limits.admit(tenant, ME, its, self.now);
            self.turn();
            self.limits.admit(tenant, ME, its, self.now)
        }

        /// A process connects; pids are the number of their tenant and another digit.
        fn connects(&mut self, pid: u32) -> Vec<Found> {
            self.pids.push(pid);
            self.turn();
            let found = self.limits.attend(self.now, &|pid| Some(pid / 10));
            self.turn();
            found
        }

        fn passes(&mut self, time: Duration) {
            self.now += time;
            self.turn();
        }

        fn set(&self) -> Limit {
            self.limits.set.unwrap()
        }
    }

    #[test]
    fn a_tenant_starts_only_once_the_control_has_its_limit() {
        let mut door = Door::new();
        let half = limit(500, 1024);
        assert!(!door.limits.admit(1, ME, half, door.now), "the control has another limit");
        assert_eq!(door.limits.wanted(door.now), Some(half));
        door.turn();
        assert!(door.limits.admit(1, ME, half, door.now));
        assert_eq!(door.connects(11), []);
    }

    #[test]
    fn tenants_with_other_limits_enter_one_by_one() {
        let mut door = Door::new();
        let (half, whole) = (limit(500, 0), Limit::WHOLE);
        assert!(door.admits(1, half));
        assert!(!door.limits.is_awaited(door.now));
        assert!(!door.admits(2, whole), "the first has not connected");
        assert!(door.limits.is_awaited(door.now));
        assert!(!door.limits.is_awaited(door.now + ASKS_WITHIN), "it was given up");
        assert!(door.admits(3, half), "its limit is the same");
        assert_eq!(door.connects(11), []);
        assert_eq!(door.connects(31), []);
        door.passes(SETTLE);
        assert!(door.admits(2, whole));
        assert_eq!((door.connects(21), door.set()), (Vec::new(), whole));
        // Afterwards nobody gets more than the smallest.
        door.passes(SETTLE);
        assert_eq!(door.set(), half);
        let late = Found { tenant: 2, pid: 22, may: whole, had: half };
        assert_eq!(door.connects(22), [late]);
        assert_eq!(
            late.to_string(),
            "its process 22 connected late and is limited to 50.0% of the SMs, not 100.0% of the \
             SMs"
        );
        door.limits.leave(1);
        door.limits.leave(3);
        door.passes(Duration::ZERO);
        assert_eq!(door.set(), whole);
    }

    #[test]
    fn the_smallest_limit_is_the_smallest_of_each_kind() {
        let mut door = Door::new();
        for (tenant, its) in [(1, limit(200, 8000)), (2, limit(700, 4000)), (3, Limit::WHOLE)] {
            assert!(door.admits(tenant, its));
            door.connects(10 * tenant + 1);
            door.passes(SETTLE);
        }
        assert_eq!(door.set(), limit(200, 4000));
    }

    #[test]
    fn a_tenant_that_never_connects_does_not_block_others() {
        let mut door = Door::new();
        let (half, whole) = (limit(500, 0), Limit::WHOLE);
        assert!(door.admits(1, whole));
        assert!(!door.admits(2, half));
        door.passes(PATIENCE);
        assert!(door.admits(2, half));
        assert_eq!(door.connects(21), []);
        door.passes(SETTLE);
        // The first may still come, with its own limit.
        assert_eq!(door.set(), whole);
        door.passes(GIVE_UP);
        assert_eq!(door.set(), half, "nor does it hold the door open for ever");
    }

    #[test]
    fn a_second_process_in_anothers_turn_is_found_out() {
        let mut door = Door::new();
        let (half, whole) = (limit(500, 1024), Limit::WHOLE);
        assert!(door.admits(1, half));
        door.connects(11);
        door.passes(SETTLE);
        assert!(door.admits(2, whole));
        let found = door.connects(12);
        assert_eq!(found, [Found { tenant: 1, pid: 12, may: half, had: whole }]);
        assert!(
            found[0].to_string().contains("only its own variables hold it to 50.0% of the SMs")
        );
        assert_eq!(door.limits.attend(door.now, &|pid| Some(pid / 10)), [], "told once");
    }

    #[test]
    fn a_new_control_gets_the_limits_again() {
        let mut door = Door::new();
        let half = limit(500, 0);
        assert!(door.admits(1, half));
        door.limits.begun_anew();
        assert!(!door.limits.admit(1, ME, half, door.now));
        door.turn();
        assert!(door.limits.admit(1, ME, half, door.now));
    }

    #[test]
    fn adopted_tenants_keep_nobody_waiting() {
        let mut limits = Limits::default();
        let (now, half) = (Instant::now(), limit(500, 0));
        limits.adopt(1, ME, Limit::WHOLE, now);
        limits.listed(&[11]);
        assert_eq!(limits.attend(now, &|_| Some(1)), [], "what it connected with is not known");
        limits.admit(2, ME, half, now);
        limits.was_set(Some(half));
        assert!(limits.admit(2, ME, half, now));
    }

    #[test]
    fn a_server_serves_one_user() {
        let mut door = Door::new();
        assert!(door.limits.serves(1, ME));
        assert!(door.admits(1, Limit::WHOLE));
        assert!(door.limits.serves(2, ME) && !door.limits.serves(2, ME + 1));
        assert!(door.limits.serves(1, ME + 1), "it does not stand in its own way");
        door.limits.leave(1);
        assert!(door.limits.serves(2, ME + 1));
    }
}
