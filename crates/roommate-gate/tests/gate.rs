//! The library preloaded into a real program, with a stand-in for the driver (`stand-in/`).
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "this is a test")]

use roommate_lease::{Gated, Leases, MOST_CLOSE, now_ns};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Tests measure times, and must not disturb each other.
static ALONE: Mutex<()> = Mutex::new(());

/// The folder of the programs, which are built once.
static BUILT: LazyLock<TempDir> = LazyLock::new(|| {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stand-in");
    let cc = |to: &str, from: &str, flags: &[&str]| {
        let mut cc = Command::new("cc");
        cc.args(["-O2", "-Wall", "-o"]).arg(folder.path().join(to)).arg(source.join(from));
        cc.args(flags).arg("-L").arg(folder.path());
        let done = cc.output().expect("a C compiler is needed for this test");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    };
    let library = ["-shared", "-fPIC"];
    cc("libcuda.so.1", "cuda.c", &[&library[..], &["-Wl,-soname,libcuda.so.1"]].concat());
    cc("shim.so", "shim.c", &[&library[..], &["-ldl"]].concat());
    cc("launcher", "launcher.c", &["-pthread", "-ldl"]);
    let linked = ["-DLINKED", "-pthread", "-Wl,--no-as-needed", "-l:libcuda.so.1", "-ldl"];
    cc("linked", "launcher.c", &linked);
    folder
});

/// What cargo builds for this test: the library beside the test's own program.
fn library() -> PathBuf {
    let library = std::env::current_exe().unwrap().with_file_name("libroommate_gate.so");
    assert!(library.exists(), "cargo did not build {}", library.display());
    library
}

/// One test: a lease file, a log of the stand-in, programs.
struct Bench {
    folder: TempDir,
    leases: Leases,
    kernel_us: u64,
    variables: Vec<(&'static str, &'static str)>,
    preload: Vec<PathBuf>,
    _alone: MutexGuard<'static, ()>,
}

/// What the stand-in saw.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Seen {
    launches: u64,
    captured: u64,
    most_in_flight: u64,
    events: u64,
    violations: u64,
    sum: u64,
    times: Vec<u64>,
}

impl Bench {
    fn new(kernel_us: u64) -> Self {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let leases = Leases::create(&folder.path().join("leases")).unwrap();
        let preload = vec![library()];
        Self { folder, leases, kernel_us, variables: Vec::new(), preload, _alone: alone }
    }

    fn with(mut self, name: &'static str, value: &'static str) -> Self {
        self.variables.push((name, value));
        self
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, words: &str) -> Command {
        let program = if words.starts_with("linked") { "linked" } else { "launcher" };
        let mut command = Command::new(BUILT.path().join(program));
        let preload: Vec<&str> = self.preload.iter().map(|p| p.to_str().unwrap()).collect();
        command.args(words.split(' ')).env("LD_LIBRARY_PATH", BUILT.path());
        command.env("LD_PRELOAD", preload.join(":")).env("ROOMMATE_GATE", self.path("leases"));
        command.env("STANDIN_LOG", self.path("log"));
        command.env("STANDIN_KERNEL_US", self.kernel_us.to_string());
        command.envs(self.variables.iter().copied());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn start(&self, words: &str) -> Running {
        Running(Some(self.command(words).spawn().unwrap()))
    }

    /// Runs a program to its end; what it printed.
    fn run(&self, words: &str) -> String {
        self.start(words).end()
    }

    fn seen(&self) -> Seen {
        let file = File::open(self.path("log")).unwrap();
        let number = |at: u64| {
            let mut bytes = [0; 8];
            file.read_exact_at(&mut bytes, at * 8).unwrap();
            u64::from_ne_bytes(bytes)
        };
        let launches = number(0);
        let times = launches.min(1 << 20) as usize;
        let mut bytes = vec![0; times * 8];
        file.read_exact_at(&mut bytes, 6 * 8).unwrap();
        let times = bytes.chunks(8).map(|b| u64::from_ne_bytes(b.try_into().unwrap()));
        Seen {
            launches,
            captured: number(1),
            most_in_flight: number(2),
            events: number(3),
            violations: number(4),
            sum: number(5),
            times: times.collect(),
        }
    }

    fn launches(&self) -> u64 {
        let file = File::open(self.path("log"));
        let mut bytes = [0; 8];
        let _ = file.and_then(|f| f.read_exact_at(&mut bytes, 0));
        u64::from_ne_bytes(bytes)
    }

    /// Waits until the program launches.
    fn launching(&self) {
        let before = self.launches();
        wait_until("a launch", || self.launches() > before + 10);
    }

    fn gated(&self) -> Gated {
        let gated = self.leases.gated();
        assert_eq!(gated.len(), 1, "{gated:?}");
        gated[0]
    }
}

struct Running(Option<Child>);

impl Running {
    fn id(&self) -> u32 {
        self.0.as_ref().unwrap().id()
    }

    fn end(mut self) -> String {
        let Output { status, stdout, stderr } = self.0.take().unwrap().wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&stderr);
        assert!(status.success() && stderr.is_empty(), "{status} {stderr}");
        String::from_utf8(stdout).unwrap().trim().into()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what} never happens");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// The number after a word of what the launcher printed.
fn number(text: &str, word: &str) -> u64 {
    let mut words = text.split_whitespace().skip_while(|w| *w != word);
    words.nth(1).and_then(|w| w.parse().ok()).unwrap_or_else(|| panic!("no {word} in {text:?}"))
}

/// Every way to find the functions.
const WAYS: [&str; 7] = ["dlsym", "main", "default", "v1", "v2", "own", "linked"];

/// Keeps the gate closed for a while; the longest time after closing at which a launch still
/// passed, and the time until the first one after opening.
fn close_for(bench: &Bench, time: Duration) -> (Duration, Duration) {
    let holder = bench.leases.holder(2).unwrap();
    let start = Instant::now();
    holder.close(MOST_CLOSE);
    let closed = now_ns();
    while start.elapsed() < time {
        std::thread::sleep(Duration::from_millis(5));
        holder.close(MOST_CLOSE);
    }
    let opened = now_ns();
    holder.open();
    bench.launching();
    let seen = bench.seen();
    let while_closed = seen.times.iter().filter(|t| (closed..opened).contains(*t));
    let last = while_closed.max().map_or(0, |t| t - closed);
    let first = seen.times.iter().filter(|t| **t >= opened).min().unwrap() - opened;
    (Duration::from_nanos(last), Duration::from_nanos(first))
}

#[test]
fn nothing_passes_while_closed_whatever_way_it_was_found() {
    for way in WAYS {
        let bench = Bench::new(20);
        let running = bench.start(&format!("{way} all 10000"));
        bench.launching();
        let (last, first) = close_for(&bench, Duration::from_millis(60));
        println!("{way}: last launch {last:?} after closing, first one {first:?} after opening");
        assert!(last < Duration::from_millis(20) && first < Duration::from_millis(20), "{way}");
        let gated = bench.gated();
        assert_eq!(gated.pid, running.id());
        assert!(gated.holds >= 1 && gated.held > Duration::from_millis(30), "{way}: {gated:?}");
        assert!(gated.launches >= 20);
        assert_eq!(bench.seen().violations, 0);
    }
}

#[test]
fn every_kind_of_launch_is_held() {
    for what in ["kernel", "ex", "cooperative", "graph"] {
        for way in ["v2", "own", "linked"] {
            let bench = Bench::new(20);
            let _running = bench.start(&format!("{way} {what} 10000"));
            bench.launching();
            let (last, _) = close_for(&bench, Duration::from_millis(40));
            assert!(last < Duration::from_millis(20), "{way} {what}: {last:?}");
        }
    }
}

#[test]
fn arguments_results_and_errors_are_the_programs_own() {
    for way in WAYS {
        let bench = Bench::new(20);
        let mut plain = bench.command(&format!("{way} once 0"));
        let plain = plain.env_remove("LD_PRELOAD").output().unwrap();
        let plain = String::from_utf8(plain.stdout).unwrap();
        assert_eq!(plain.trim(), "0 0 0 0 719 719 719 719 1", "{way}");
        let alone = bench.seen();
        fs::remove_file(bench.path("log")).unwrap();
        for attended in [false, true] {
            if attended {
                bench.leases.holder(0).unwrap().attend(Duration::from_secs(5));
            }
            assert_eq!(bench.run(&format!("{way} once 0")), plain.trim(), "{way}");
            let seen = bench.seen();
            assert_eq!((seen.launches, seen.sum), (alone.launches, alone.sum), "{way}");
            fs::remove_file(bench.path("log")).unwrap();
        }
    }
}

/// What the other process does: it keeps the gate closed until it is killed. Without the variable
/// this is an empty test.
#[test]
fn other_process() {
    let Some(path) = std::env::var_os("ROOMMATE_GATE_TEST") else { return };
    let leases = Leases::open(Path::new(&path)).unwrap();
    // Not for ever, should the test fail that would kill it.
    for _ in 0..10_000 {
        leases.holder(7).unwrap().close(Duration::from_millis(50));
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_holder_that_is_killed_opens_within_100_ms() {
    let bench = Bench::new(20);
    let _running = bench.start("v2 all 20000");
    bench.launching();
    let mut holder = Command::new(std::env::current_exe().unwrap());
    holder.args(["--exact", "other_process"]).env("ROOMMATE_GATE_TEST", bench.path("leases"));
    let holder = Running(Some(holder.stdout(Stdio::null()).spawn().unwrap()));
    wait_until("closing", || bench.leases.is_closed(now_ns()));
    std::thread::sleep(Duration::from_millis(100));
    let before = bench.launches();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(bench.launches(), before, "closed");
    let killed = now_ns();
    drop(holder);
    bench.launching();
    let first = bench.seen().times.iter().filter(|t| **t >= killed).min().unwrap() - killed;
    println!("first launch {:?} after the holder was killed", Duration::from_nanos(first));
    assert!(first < 100_000_000);
}

/// Runs a program while the gate is attended and closed all the time, for at most 2 s.
fn run_closed(bench: &Bench, words: &str) -> (String, Duration) {
    let holder = bench.leases.holder(0).unwrap();
    holder.attend(Duration::from_secs(10));
    let done = AtomicBool::new(false);
    std::thread::scope(|s| {
        holder.close(MOST_CLOSE);
        s.spawn(|| {
            let start = Instant::now();
            while !done.load(Relaxed) && start.elapsed() < Duration::from_secs(2) {
                holder.close(MOST_CLOSE);
                std::thread::sleep(Duration::from_millis(5));
            }
            holder.leave();
        });
        let start = Instant::now();
        let printed = bench.run(words);
        done.store(true, Relaxed);
        (printed, start.elapsed())
    })
}

#[test]
fn nothing_waits_or_is_recorded_inside_a_capture() {
    let bench = Bench::new(20);
    let (printed, took) = run_closed(&bench, "v2 capture 20000 1 200");
    assert!(took < Duration::from_millis(1500), "{took:?}");
    assert_eq!(number(&printed, "launches"), 200);
    let seen = bench.seen();
    assert_eq!((seen.captured, seen.launches, seen.events, seen.violations), (200, 0, 0, 0));
    // The same program is held when it does not capture.
    let (_, took) = run_closed(&bench, "v2 kernel 20000 1 200");
    assert!(took > Duration::from_millis(1900), "{took:?}");
}

#[test]
fn a_stream_that_cannot_be_asked_does_not_wait() {
    let bench = Bench::new(20).with("STANDIN_FAIL", "cuStreamIsCapturing");
    let (printed, took) = run_closed(&bench, "v2 all 20000 1 200");
    assert!(took < Duration::from_millis(1500), "{took:?}");
    assert_eq!(number(&printed, "launches"), 200);
    assert_eq!(bench.seen().events, 0);
}

#[test]
fn a_forked_child_counts_for_itself() {
    let bench = Bench::new(20);
    let holder = bench.leases.holder(0).unwrap();
    holder.attend(Duration::from_secs(10));
    let running = bench.start("v2 fork 1500");
    wait_until("two entries", || bench.leases.gated().len() == 2);
    let gated = bench.leases.gated();
    let parent = gated.iter().find(|g| g.pid == running.id()).unwrap();
    assert_eq!(parent.launches, 40);
    let (last, _) = close_for(&bench, Duration::from_millis(60));
    assert!(last < Duration::from_millis(20), "{last:?}");
    let child = *bench.leases.gated().iter().find(|g| g.pid != running.id()).unwrap();
    assert!(child.holds >= 1 && child.launches > 10, "{child:?}");
    let printed = running.end();
    assert_eq!(u64::from(child.pid), number(&printed, "child"));
    assert_eq!(number(&printed, "refused"), 0);
    assert_eq!(bench.seen().violations, 0);
}

#[test]
fn a_process_that_never_launches_is_not_listed() {
    let bench = Bench::new(20);
    let _running = bench.start("v2 all 0");
    std::thread::sleep(Duration::from_millis(50));
    let mut sleep = Command::new("sleep");
    sleep.arg("5").env("LD_PRELOAD", library()).env("ROOMMATE_GATE", bench.path("leases"));
    let _sleep = Running(Some(sleep.spawn().unwrap()));
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(bench.leases.gated(), []);
}

/// Attends for the whole life of a program; its entry shortly before its end, and what was seen.
fn attended(bench: &Bench, words: &str) -> (Gated, String, Seen) {
    bench.leases.holder(0).unwrap().attend(Duration::from_secs(10));
    let running = bench.start(words);
    bench.launching();
    std::thread::sleep(Duration::from_millis(600));
    let gated = bench.gated();
    let printed = running.end();
    (gated, printed, bench.seen())
}

#[test]
fn a_process_without_attention_runs_ahead_freely() {
    let bench = Bench::new(100);
    bench.run("v2 kernel 300");
    let seen = bench.seen();
    assert!(seen.most_in_flight > 1000, "{} in flight", seen.most_in_flight);
    assert_eq!(seen.events, 0);
}

#[test]
fn an_attended_process_runs_ahead_by_few_groups() {
    for (kernel_us, expect) in [(20, 20..=64), (100, 4..=16), (2_000, 1..=2)] {
        let bench = Bench::new(kernel_us);
        let (gated, printed, seen) = attended(&bench, "v2 kernel 1000");
        println!(
            "kernels of {kernel_us} us: groups of {}, at most {} in flight, {} launches in 1 s",
            gated.group, seen.most_in_flight, seen.launches
        );
        assert!(expect.contains(&gated.group), "{kernel_us}: {gated:?}");
        // The first groups have 16.
        assert!(seen.most_in_flight <= u64::from(4 * gated.group.max(16)), "{kernel_us}");
        assert!(seen.launches > 500_000 / kernel_us, "the GPU had work: {}", seen.launches);
        assert_eq!((seen.violations, number(&printed, "mode")), (0, 0));
    }
}

#[test]
fn a_graph_is_a_group_of_its_own() {
    let bench = Bench::new(100);
    let (gated, _, seen) = attended(&bench, "v2 graph 1000");
    println!("graphs of 10 kernels: at most {} kernels in flight", seen.most_in_flight);
    assert!(seen.most_in_flight <= 40 && seen.launches > 500, "{gated:?}");
    assert_eq!(seen.events, seen.launches);
    assert_eq!(gated.group, 1);
}

#[test]
fn a_process_is_not_ahead_by_many_long_kernels() {
    // Kernels of 20 us, and series of ten that take 2 ms each.
    let bench = Bench::new(20);
    bench.leases.holder(0).unwrap().attend(Duration::from_secs(10));
    let _running = bench.start("v2 mixed 20000");
    bench.launching();
    std::thread::sleep(Duration::from_millis(600));
    // Which kernels are long is known now.
    let log = File::options().write(true).open(bench.path("log")).unwrap();
    log.write_all_at(&[0; 8], 2 * 8).unwrap();
    std::thread::sleep(Duration::from_millis(400));
    let seen = bench.seen();
    let ahead = Duration::from_micros(20 * seen.most_in_flight);
    println!("at most {ahead:?} of work in flight, {} launches", seen.launches);
    // One runs and one waits, with some short ones; without a limit by time it would be all ten.
    assert!(ahead < Duration::from_millis(7), "{ahead:?}");
    assert!(seen.launches > 300 * 20, "the GPU had work: {}", seen.launches);
}

#[test]
fn a_kernel_without_end_does_not_stop_the_process() {
    let bench = Bench::new(100_000_000);
    bench.leases.holder(0).unwrap().attend(Duration::from_secs(10));
    let start = Instant::now();
    bench.run("v2 kernel 2500 1 48");
    // A wait of a second, after the third group of 16.
    assert!((1..3).contains(&start.elapsed().as_secs()), "{:?}", start.elapsed());
    assert_eq!(bench.seen().launches, 48);
}

#[test]
fn a_process_is_free_as_soon_as_nobody_attends() {
    let bench = Bench::new(100_000);
    let holder = bench.leases.holder(0).unwrap();
    holder.attend(Duration::from_secs(10));
    let _running = bench.start("v2 kernel 10000");
    wait_until("three groups", || bench.launches() == 48);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(bench.launches(), 48, "it waits for the first group");
    holder.leave();
    bench.launching();
}

#[test]
fn a_driver_that_refuses_our_calls_is_left_alone() {
    for call in ["cuEventCreate", "cuEventRecord", "cuEventQuery", "cuCtxGetCurrent"] {
        let bench = Bench::new(100).with("STANDIN_FAIL", call);
        bench.leases.holder(0).unwrap().attend(Duration::from_secs(10));
        let printed = bench.run("v2 kernel 200");
        assert_eq!((number(&printed, "refused"), number(&printed, "mode")), (0, 0), "{call}");
        let seen = bench.seen();
        assert!(seen.most_in_flight > 200, "{call}: not limited");
        // It is still held.
        let running = bench.start("v2 kernel 10000");
        bench.launching();
        let (last, _) = close_for(&bench, Duration::from_millis(40));
        assert!(last < Duration::from_millis(20), "{call}: {last:?}");
        drop(running);
    }
    let bench = Bench::new(100).with("STANDIN_FAIL", "cuThreadExchangeStreamCaptureMode");
    bench.leases.holder(0).unwrap().attend(Duration::from_secs(10));
    assert_eq!(number(&bench.run("v2 kernel 200"), "refused"), 0);
    assert_eq!(bench.seen().events, 0);
}

#[test]
fn without_a_valid_lease_file_nothing_changes() {
    for broken in ["absent", "corrupt", "folder", "empty variable", "no variable"] {
        let bench = Bench::new(100);
        bench.leases.holder(0).unwrap().attend(Duration::from_secs(10));
        let path = bench.path("other");
        match broken {
            "corrupt" => fs::write(&path, vec![0x5a; 4096]).unwrap(),
            "folder" => fs::create_dir(&path).unwrap(),
            _ => {}
        }
        for way in WAYS {
            let mut command = bench.command(&format!("{way} all 30"));
            match broken {
                "empty variable" => command.env("ROOMMATE_GATE", ""),
                "no variable" => command.env_remove("ROOMMATE_GATE"),
                _ => command.env("ROOMMATE_GATE", &path),
            };
            let printed = Running(Some(command.spawn().unwrap())).end();
            assert!(number(&printed, "launches") > 0, "{broken} {way}");
            assert_eq!(number(&printed, "refused"), 0, "{broken} {way}");
        }
        assert_eq!(bench.seen().events, 0);
        assert_eq!(bench.leases.gated(), []);
    }
}

#[test]
fn many_threads_neither_stop_nor_run_away() {
    let bench = Bench::new(20);
    let holder = bench.leases.holder(0).unwrap();
    holder.attend(Duration::from_secs(10));
    let running = bench.start("v2 all 2000 8");
    bench.launching();
    for _ in 0..5 {
        let (last, first) = close_for(&bench, Duration::from_millis(40));
        assert!(last < Duration::from_millis(20), "{last:?}");
        assert!(first < Duration::from_millis(100), "{first:?}");
    }
    let printed = running.end();
    let seen = bench.seen();
    println!("8 threads: {printed}, at most {} kernels in flight", seen.most_in_flight);
    assert_eq!((number(&printed, "refused"), seen.violations), (0, 0));
    // A thread that is preempted while it ends a group lets the others run on.
    assert!(seen.most_in_flight < 8000, "{}", seen.most_in_flight);
}

#[test]
fn another_preloaded_library_still_finds_the_next_one() {
    for is_first in [false, true] {
        for by_handle in [false, true] {
            let mut bench = Bench::new(20);
            if by_handle {
                bench = bench.with("SHIM_HANDLE", "1");
            }
            bench.preload.insert(usize::from(!is_first), BUILT.path().join("shim.so"));
            let printed = bench.run("linked kernel 10000 1 50");
            let case = format!("first {is_first}, by handle {by_handle}: {printed}");
            assert_eq!(number(&printed, "launches"), 50, "{case}");
            assert_eq!(number(&printed, "refused"), 0, "{case}");
            assert_eq!((number(&printed, "passed"), number(&printed, "right")), (50, 1), "{case}");
            assert_eq!(bench.seen().launches, 50, "{case}");
            let (_, took) = run_closed(&bench, "linked kernel 20000 1 50");
            assert!(took > Duration::from_millis(1900), "held: {case}");
        }
    }
}

#[test]
fn a_program_without_a_driver_finds_none() {
    let bench = Bench::new(20);
    let script = "import ctypes\n\
                  for handle in (None, 'libc.so.6'):\n\
                  \x20   print(hasattr(ctypes.CDLL(handle), 'cuLaunchKernel'))\n\
                  print(ctypes.CDLL(None).getpid() > 0)";
    let mut python = Command::new("python3");
    python.args(["-c", script]).env("LD_PRELOAD", library());
    let done = python.env("ROOMMATE_GATE", bench.path("leases")).output().unwrap();
    let printed = String::from_utf8_lossy(&done.stdout);
    assert!(printed.split_whitespace().eq(["False", "False", "True"]), "{done:?}");
}

#[test]
fn a_launch_costs_little_when_nobody_attends() {
    let bench = Bench::new(0);
    let cost = |command: &mut Command| -> f64 {
        let mut runs: Vec<f64> = (0..3)
            .map(|_| {
                let done = command.output().unwrap();
                String::from_utf8(done.stdout).unwrap().trim().parse().unwrap()
            })
            .collect();
        runs.sort_by(f64::total_cmp);
        runs[0]
    };
    let without = cost(bench.command("v2 cost 0").env_remove("LD_PRELOAD"));
    let idle = cost(&mut bench.command("v2 cost 0"));
    // A lease that ended needs a look at the clock.
    bench.leases.holder(0).unwrap().close(Duration::from_nanos(1));
    let ended = cost(&mut bench.command("v2 cost 0"));
    bench.leases.holder(0).unwrap().attend(Duration::from_secs(10));
    let attended = cost(&mut bench.command("v2 cost 0"));
    println!(
        "ns for a launch that does nothing: {without} without the library, {idle} idle, {ended} \
         with leases that ended, {attended} attended"
    );
    // On a quiet machine below 60; a busy one must not fail for it.
    assert!(idle - without < 1000.0, "{idle}");
}
