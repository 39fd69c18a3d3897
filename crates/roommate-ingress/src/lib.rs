//! The front of a service: it stands between clients and the worker of one service.
//!
//! ```text
//!  clients ──HTTP──▶ front ──batches, Unix socket──▶ worker with the SDK
//!                      │  └──HTTP──▶ any other model server
//!                      └──tenant protocol──▶ machine: what was served, how to go on
//! ```
//!
//! A front is a process of the job, run as the job's owner. One thread with an asynchronous runtime
//! does everything, so nothing is locked. It refuses what it has no room or time for, restarts a
//! worker that dies or hangs, and measures every request.

mod frame;
mod front;
mod gate;
mod guard;
mod hold;
mod http;
mod machine;
mod passed;
mod proxy;
mod queue;
mod shared;
pub mod spec;
mod stats;
pub mod tensor;
mod times;
mod trace;
mod worker;
#[cfg(test)]
mod world;
mod worth;

use front::Front;
use proxy::Upstream;
use spec::{Server, Spec};
use std::io::{self, Write as _};
use std::rc::Rc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::{LocalSet, spawn_local};
use tokio::time::sleep;

/// How long requests may take to be answered when the service ends.
const DRAIN: Duration = Duration::from_secs(10);
/// How often pressure and deadlines are looked at.
const TICK: Duration = Duration::from_millis(5);
/// How often the gate is looked at while requests are answered.
const GATE_TICK: Duration = Duration::from_millis(1);
/// Exit status where the worker could not be kept running: another attempt may help.
const TRY_AGAIN: u8 = 75;
/// Exit status of a wrong set-up, which would recur.
const WRONG: u8 = 64;

/// Runs the front of a service with this worker until it is told to end; the exit status.
pub fn run(spec: Spec, worker: &[String]) -> u8 {
    raise_descriptors();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(e) => return fail(&format!("could not start: {e}"), TRY_AGAIN),
    };
    LocalSet::new().block_on(&runtime, serve(spec, worker))
}

fn fail(why: &str, status: u8) -> u8 {
    say(why);
    status
}

/// Writes a line to the log of the job. A closed log is no reason to stop.
fn say(what: &str) {
    let _ = writeln!(io::stderr(), "roommate: {what}");
}

/// Every connection is a file descriptor.
fn raise_descriptors() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
}

async fn serve(spec: Spec, worker: &[String]) -> u8 {
    let listener = match TcpListener::bind(&spec.listen).await {
        Ok(listener) => listener,
        Err(e) => return fail(&format!("could not listen at {}: {e}", spec.listen), WRONG),
    };
    if let Ok(at) = listener.local_addr() {
        say(&format!("{} at http://{at}/v2/models/{}", spec.name, spec.model));
    }
    let upstream = match &spec.server {
        Server::Sdk {} => None,
        Server::Http { port, health } => match free_port(*port).await {
            Ok(port) => Some(Rc::new(Upstream::new(port, health.clone()))),
            Err(e) => return fail(&format!("no free port for the server: {e}"), TRY_AGAIN),
        },
    };
    let front = Rc::new(Front::new(spec));
    spawn_local(http::listen(Rc::clone(&front), upstream.clone(), listener));
    spawn_local({
        let front = Rc::clone(&front);
        async move { machine::speak(&front).await }
    });
    spawn_local({
        let front = Rc::clone(&front);
        async move {
            loop {
                sleep(TICK).await;
                front.press();
            }
        }
    });
    spawn_local({
        let front = Rc::clone(&front);
        async move {
            loop {
                front.look_at_gate();
                sleep(if front.is_busy() { GATE_TICK } else { TICK }).await;
            }
        }
    });
    spawn_local(end_on_signals(Rc::clone(&front)));
    let kept = async {
        match &upstream {
            None => worker::keep(&front, worker).await,
            Some(upstream) => upstream.keep(&front, worker).await,
        }
    };
    let ended = tokio::select! {
        kept = kept => kept,
        () = drained_long_ago(&front) => Ok(()),
    };
    // What was answered last is still on its way.
    let until = Instant::now() + Duration::from_millis(500);
    while front.open.get() > 0 && Instant::now() < until {
        sleep(TICK).await;
    }
    match ended {
        Ok(()) => 0,
        Err(why) => fail(&why, TRY_AGAIN),
    }
}

/// A given port, or a free one.
async fn free_port(given: u16) -> std::io::Result<u16> {
    if given > 0 {
        return Ok(given);
    }
    Ok(TcpListener::bind("127.0.0.1:0").await?.local_addr()?.port())
}

async fn end_on_signals(front: Rc<Front>) {
    let (Ok(mut term), Ok(mut int)) =
        (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return;
    };
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    front.drain();
}

/// Resolves when the service has been told to end for too long.
async fn drained_long_ago(front: &Front) {
    let mut since = None;
    loop {
        sleep(TICK).await;
        if front.phase.get() == front::Phase::Draining {
            let began = *since.get_or_insert_with(Instant::now);
            if began.elapsed() > DRAIN {
                return;
            }
        }
    }
}
