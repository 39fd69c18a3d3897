//! An MPS daemon that is monitored: a thread restarts it when it ends, lists its clients, and has
//! its control set their limits.

use super::limits::{Found, Limit, Limits};
use super::{Client, Mps};
use crate::device::nvidia::selftest::Control;
use crate::process;
use crate::process::kin::Kin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How often the daemon is checked, and how often while a tenant waits.
const LOOK_EVERY: Duration = Duration::from_secs(3);
const LOOK_BUSY: Duration = Duration::from_millis(250);

/// How often in a row the control may fail to set a limit before jobs start without it.
const FAILURES: u32 = 3;

/// An MPS daemon that is monitored until this is dropped or closed.
pub(crate) struct Watched {
    mps: Mps,
    /// Memory of the GPU, which is the limit of a client without one.
    mem_mib: u32,
    /// Whether limits that are set at the control hold.
    binds: bool,
    state: Mutex<State>,
    changed: Condvar,
    well: AtomicBool,
    /// How often it was restarted.
    restarts: AtomicU32,
    over: AtomicBool,
}

struct State {
    limits: Limits,
    /// Why limits could not be set at the control, and how often in a row.
    trouble: Option<String>,
    failures: u32,
    /// Pids of the daemon's servers, and their clients.
    servers: Vec<u32>,
    clients: Vec<Client>,
    notices: Vec<String>,
}

impl Watched {
    /// Watches a daemon that runs, with what its self-test found of the control's limits.
    pub(crate) fn start(mps: Mps, mem_mib: u32, control: Control) -> Result<Arc<Self>, String> {
        let it = Arc::new(Self::new(mps, mem_mib, control));
        let thread = Arc::clone(&it);
        let watch = move || thread.watch();
        process::small_thread("mps", watch)
            .map_err(|e| format!("could not start a thread: {e}"))?;
        Ok(it)
    }

    fn new(mps: Mps, mem_mib: u32, control: Control) -> Self {
        let mut limits = Limits::default();
        if control == Control::Holds {
            limits.begun_anew();
        }
        let fails = (control == Control::Fails).then_some("the self-test found that they fail");
        let failures = if fails.is_some() { FAILURES } else { 0 };
        let (servers, clients, notices) = (Vec::new(), Vec::new(), Vec::new());
        let trouble = fails.map(String::from);
        Self {
            mps,
            mem_mib,
            binds: control != Control::Fails,
            state: Mutex::new(State { limits, trouble, failures, servers, clients, notices }),
            changed: Condvar::new(),
            well: AtomicBool::new(true),
            restarts: AtomicU32::new(0),
            over: AtomicBool::new(false),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The daemon itself.
    pub(crate) fn mps(&self) -> &Mps {
        &self.mps
    }

    pub(crate) fn is_well(&self) -> bool {
        self.well.load(Ordering::Relaxed)
    }

    pub(crate) fn restarts(&self) -> u32 {
        self.restarts.load(Ordering::Relaxed)
    }

    /// Its state as shown to people.
    pub(crate) fn words(&self) -> String {
        let well = if self.is_well() { "well" } else { "down" };
        let trouble = self.state().trouble.clone();
        trouble.map_or(well.into(), |why| format!("{well}, limits are not set: {why}"))
    }

    /// Whether a tenant of this user can be a client beside those that are here.
    pub(crate) fn serves(&self, tenant: u32, uid: u32) -> bool {
        self.state().limits.serves(tenant, uid)
    }

    /// Whether the tenant was let in.
    pub(crate) fn has(&self, tenant: u32) -> bool {
        self.limit_of(tenant).is_some()
    }

    /// What the tenant was let in with.
    pub(crate) fn limit_of(&self, tenant: u32) -> Option<Limit> {
        self.state().limits.of(tenant)
    }

    /// Whether the process of a tenant may be started now; see [`Limits::admit`].
    pub(crate) fn admit(&self, tenant: u32, uid: u32, limit: Limit, now: Instant) -> bool {
        let mut state = self.state();
        let ready = state.limits.admit(tenant, uid, limit, now);
        // A control that does not obey must not keep jobs from running.
        let open = ready || state.failures >= FAILURES && state.limits.has(tenant);
        if state.limits.wanted(now).is_some() {
            self.changed.notify_all();
        }
        open
    }

    pub(crate) fn adopt(&self, tenant: u32, uid: u32, limit: Limit, now: Instant) {
        self.state().limits.adopt(tenant, uid, limit, now);
        self.changed.notify_all();
    }

    pub(crate) fn leave(&self, tenant: u32) {
        self.state().limits.leave(tenant);
        self.changed.notify_all();
    }

    /// Finds the tenants of clients. Returns clients with another limit than their tenant's, and
    /// what else happened.
    pub(crate) fn attend(
        &self,
        now: Instant,
        owner: &dyn Fn(u32) -> Option<u32>,
    ) -> (Vec<Found>, Vec<String>) {
        let mut state = self.state();
        (state.limits.attend(now, owner), std::mem::take(&mut state.notices))
    }

    /// Whether a tenant waits: for the control, or for another to connect.
    pub(crate) fn is_awaited(&self, now: Instant) -> bool {
        self.binds && self.state().limits.is_awaited(now)
    }

    /// Pids of the daemon's servers.
    pub(crate) fn servers(&self) -> Vec<u32> {
        self.state().servers.clone()
    }

    /// Ends the work of a tenant's processes. Where the daemon is slow to list its clients, those
    /// of the last look are used: a process that is killed while it works can crash its roommates.
    pub(crate) fn let_go(&self, kin: &Kin) {
        if !self.is_well() {
            return;
        }
        let clients = self.mps.list_soon().unwrap_or_else(|_| self.state().clients.clone());
        for client in clients.into_iter().filter(|c| kin.has(c.pid)) {
            let _ = self.mps.end_work(client);
        }
    }

    /// Ends the monitoring, and the daemon if `stop`.
    pub(crate) fn close(&self, stop: bool) {
        self.over.store(true, Ordering::Relaxed);
        self.changed.notify_all();
        if stop {
            self.mps.stop();
        }
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    fn watch(&self) {
        loop {
            let state = self.state();
            let busy = self.binds && state.limits.is_awaited(Instant::now());
            let wait = if busy { LOOK_BUSY } else { LOOK_EVERY };
            drop(self.changed.wait_timeout(state, wait));
            if self.is_over() {
                return;
            }
            self.turn(Instant::now());
        }
    }

    /// Checks the daemon once, and has it do what is due.
    fn turn(&self, now: Instant) {
        let looked = self.look(now);
        if looked.is_ok() || self.is_over() {
            self.well.store(true, Ordering::Relaxed);
            return;
        }
        // It may be slow for once: it is well if it answers when it has more time.
        let begun = self.mps.ensure();
        self.well.store(begun.is_ok(), Ordering::Relaxed);
        if begun != Ok(true) {
            return;
        }
        if self.is_over() {
            self.mps.stop();
            return;
        }
        self.restarts.fetch_add(1, Ordering::Relaxed);
        let mut state = self.state();
        state.limits.begun_anew();
        let ended = "the MPS daemon ended without being asked to and was started again; whoever \
                     used it lost its work on the GPU";
        state.notices.push(ended.into());
    }

    /// Lists servers and clients, and sets the limit that is wanted.
    fn look(&self, now: Instant) -> Result<(), String> {
        let servers = self.mps.servers()?;
        let mut clients = Vec::new();
        for server in servers.iter().copied() {
            let pids = self.mps.clients(server)?.into_iter();
            clients.extend(pids.map(|pid| Client { server, pid }));
        }
        let pids: Vec<u32> = clients.iter().map(|c| c.pid).collect();
        let mut state = self.state();
        state.limits.listed(&pids);
        (state.servers, state.clients) = (servers, clients);
        let wanted = state.limits.wanted(now).filter(|_| self.binds);
        let Some(limit) = wanted else { return Ok(()) };
        drop(state);
        let set = self.mps.limit(limit, self.mem_mib);
        let mut state = self.state();
        state.limits.was_set(set.is_ok().then_some(limit));
        state.failures = if set.is_ok() { 0 } else { state.failures.saturating_add(1) };
        state.trouble = set.err();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::fake::{self, until};
    use super::*;
    use std::fs;
    use tempfile::TempDir;

    const ME: u32 = 1000;

    struct Room {
        watched: Arc<Watched>,
        folder: TempDir,
    }

    impl Room {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let mps = fake::mps(folder.path());
            mps.ensure().unwrap();
            Self { watched: Watched::start(mps, 8192, Control::Holds).unwrap(), folder }
        }

        fn file(&self, name: &str) -> std::path::PathBuf {
            self.folder.path().join("mps-00000000/log").join(name)
        }

        fn clients(&self, text: &str) {
            fs::write(self.file("fake-clients"), text).unwrap();
        }

        fn log(&self) -> String {
            fs::read_to_string(self.file("control.log")).unwrap()
        }
    }

    impl Drop for Room {
        fn drop(&mut self) {
            let _ = fs::remove_file(self.file("fake-clients"));
            self.watched.close(true);
        }
    }

    #[test]
    fn limits_are_set_for_running_servers_and_the_next() {
        let room = Room::new();
        let half = Limit { sm_permille: 500, mem_mib: Some(1024) };
        let admitted = |tenant, limit| room.watched.admit(tenant, ME, limit, Instant::now());
        assert!(!admitted(1, half));
        until("the first limit", || admitted(1, half));
        let log = room.log();
        assert!(log.contains("Command set_default_active_thread_percentage 50.0"), "{log}");
        assert!(log.contains("Command set_default_device_pinned_mem_limit 0 1024M"), "{log}");
        assert!(!log.contains("set_active_thread_percentage"), "no server yet: {log}");
        assert!(!admitted(2, Limit::WHOLE));
        room.clients("71");
        until("its client", || {
            room.watched.attend(Instant::now(), &|_| Some(1));
            admitted(2, Limit::WHOLE)
        });
        let log = room.log();
        assert!(log.contains("Command set_active_thread_percentage 4242 100.0"), "{log}");
        // Where there was a limit of memory, no limit is all of it.
        assert!(log.contains("Command set_device_pinned_mem_limit 4242 0 8192M"), "{log}");
        assert_eq!((room.watched.words(), room.watched.servers()), ("well".into(), vec![4242]));
    }

    #[test]
    fn a_control_that_does_not_obey_is_reported_and_stops_nobody() {
        let room = Room::new();
        fs::write(room.file("fake-stubborn"), "").unwrap();
        let half = Limit { sm_permille: 500, mem_mib: None };
        until("the start", || room.watched.admit(1, ME, half, Instant::now()));
        let words = room.watched.words();
        assert!(words.starts_with("well, limits are not set: the MPS control"), "{words}");
    }

    #[test]
    fn clients_are_let_go_when_they_cannot_be_listed() {
        let room = Room::new();
        let this = std::process::id();
        room.clients(&format!("{this} 1"));
        until("a look", || room.watched.state().clients.len() == 2);
        fs::write(room.file("fake-unlisted"), "").unwrap();
        let kin = Kin { leader: process::Process::this(), token: String::new(), members: vec![] };
        room.watched.let_go(&kin);
        let log = room.log();
        assert!(log.contains(&format!("Command terminate_client 4242 {this}\n")), "{log}");
        assert!(!log.contains("terminate_client 4242 1\n"), "{log}");
    }

    #[test]
    fn an_end_that_nobody_asked_for_is_told() {
        let room = Room::new();
        let half = Limit { sm_permille: 500, mem_mib: None };
        until("a limit", || room.watched.admit(1, ME, half, Instant::now()));
        // What a tenant of the same user can do.
        room.watched.mps.ask("quit", Duration::from_secs(5)).unwrap();
        until("a restart", || room.watched.restarts() == 1);
        let (_, notices) = room.watched.attend(Instant::now(), &|_| None);
        assert!(notices[0].starts_with("the MPS daemon ended without being asked to"));
        until("the limit again", || room.watched.admit(1, ME, half, Instant::now()));
        let sets = "set_default_active_thread_percentage 50.0";
        assert_eq!(room.log().matches(sets).count(), 2);
    }
}
