use super::*;
use expect_test::expect;
use roommate_agent::api::control::{JobView, MachineView};
use roommate_agent::api::event_text::EventLine;
use roommate_agent::device::SelfTest;
use roommate_core::number::Number;
use screen::Mode;

fn job(idx: u32, name: &str, state: &str, devices: &[u32]) -> JobView {
    let value = serde_json::json!({
        "name": name, "idx": idx, "state": state, "ended": false, "devices": devices, "wants": 1,
        "share": 0.5, "pace": 1.0, "batch": 64, "done": 250.0, "steps": 1000.0, "step_s": 0.0421,
        "left_s": 31.6, "noise_scale": null, "mem_mib": 512, "cooperative": true, "starts": 1,
        "failures": 0, "submitted_s": 1.0, "age_s": 42.0, "class": "guaranteed", "team": null,
        "why": null, "exit": null, "keeper_pid": 7, "log": "/state/jobs/0/log",
        "command": ["python3", "train.py"]
    });
    serde_json::from_value(value).unwrap()
}

fn snapshot() -> Snapshot {
    let waits = |idx, name: &str, state: &str, reason: &str| JobView {
        why: Some(reason.into()),
        left_s: None,
        class: "best-effort".into(),
        ..job(idx, name, state, &[])
    };
    let opaque = JobView {
        share: Number::of(0.0),
        pace: Number::of(0.4),
        class: "best-effort".into(),
        batch: None,
        steps: None,
        step_s: None,
        left_s: None,
        mem_mib: None,
        cooperative: false,
        ..job(1, "opaque", "running", &[0])
    };
    let done = JobView { ended: true, ..job(5, "early", "failed: exit 3", &[]) };
    let event = |at_s, job: &str, what: &str| EventLine {
        at_s: Number::of(at_s),
        job: job.into(),
        what: what.into(),
    };
    Snapshot {
        machine: MachineView {
            pid: 4242,
            policy: "gandiva".into(),
            cluster: "1x3:cpu".into(),
            devices: 3,
            enforcement: serde_json::from_value::<SelfTest>(
                serde_json::json!({ "tier": "cgroup-v2", "what": "tested" }),
            )
            .unwrap(),
            up_s: Number::of(63.0),
            jobs: 5,
            rss_mib: Number::of(12.3),
            journal: "part 1, 0.0 MiB".into(),
            http: None,
            gpus: Vec::new(),
            notices: Vec::new(),
            recent: vec![
                event(1.0, "resnet", "submitted"),
                event(1.0, "resnet", "to start on device 0"),
                event(1.1, "resnet", "runs"),
                event(40.0, "late", "submitted"),
            ],
        },
        jobs: vec![
            job(0, "resnet", "running", &[0]),
            opaque,
            JobView { share: Number::of(1.0), ..job(2, "bert", "suspended", &[1]) },
            waits(3, "late", "pending", "no device is free"),
            waits(4, "slept", "waits in memory", "its time slice is over"),
            done,
        ],
    }
}

fn screen() -> Screen {
    let mut screen = Screen::default();
    screen.take(Ok(snapshot()));
    screen
}

#[test]
fn everything_fits_a_small_terminal() {
    let text = frame_as_text(&screen(), 80, 24).unwrap();
    assert!(text.lines().all(|l| l.chars().count() <= 80));
    expect![[r#"
        roommate  3 devices  gandiva  cgroup-v2  up 63.0 s  1 ended, 1 failed
        devices: 2 of 3 in use ─────────────────────────────────────────────────────────
          0 ▕aaaaaaaaaaaaabbbbbbbbbbbbb▏ a resnet 50%, b opaque free at 40%
          1 ▕cccccccccccccccccccccccccc▏ c bert 100%
          2 ▕··························▏ idle
        3 tenants by submission ────────────────────────────────────────────────────────
          name        state     class done     step batch share          memory     left
        a resnet      running   guar.  25%  42.1 ms    64   50%         512 MiB   31.6 s
        b opaque      running   best     -        -     - free at 40%         -        -
        c bert        suspended guar.  25%  42.1 ms    64  100%         512 MiB   31.6 s
        2 jobs waiting ─────────────────────────────────────────────────────────────────
          late     pending         best  1 dev    42.0 s no device is free
          slept    waits in memory best  1 dev    42.0 s its time slice is over
        last events ────────────────────────────────────────────────────────────────────
            1.0 s  resnet  submitted
            1.0 s  resnet  to start on device 0
            1.1 s  resnet  runs
           40.0 s  late  submitted





        arrows choose  enter details  s suspend  r resume  c cancel  o order  q quit
    "#]]
    .assert_eq(&text);
}

#[test]
fn a_large_terminal_has_room_for_reasons() {
    expect![[r#"
        roommate  3 devices  gandiva  cgroup-v2  up 63.0 s  1 ended, 1 failed
        devices: 2 of 3 in use ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
          0 ▕aaaaaaaaaaaaaaaaaaaaaabbbbbbbbbbbbbbbbbbbbbb▏ a resnet 50%, b opaque free at 40%
          1 ▕cccccccccccccccccccccccccccccccccccccccccccc▏ c bert 100%
          2 ▕············································▏ idle
        3 tenants by submission ────────────────────────────────────────────────────────────────────────────────────────────────────────────
          name                                                            state     class done     step batch share          memory     left
        a resnet                                                          running   guar.  25%  42.1 ms    64   50%         512 MiB   31.6 s
        b opaque                                                          running   best     -        -     - free at 40%         -        -
        c bert                                                            suspended guar.  25%  42.1 ms    64  100%         512 MiB   31.6 s
        2 jobs waiting ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
          late     pending         best  1 dev    42.0 s no device is free
          slept    waits in memory best  1 dev    42.0 s its time slice is over
        last events ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
            1.0 s  resnet  submitted
            1.0 s  resnet  to start on device 0
            1.1 s  resnet  runs
           40.0 s  late  submitted











        arrows choose  enter details  s suspend  r resume  c cancel  o order  q quit
    "#]].assert_eq(&frame_as_text(&screen(), 132, 30).unwrap());
}

#[test]
fn one_job_in_detail() {
    let mut screen = screen();
    screen.press(Key::Enter);
    expect![[r#"
        roommate  3 devices  gandiva  cgroup-v2  up 63.0 s  1 ended, 1 failed
        resnet ─────────────────────────────────────────────────────────────────────────
        name        resnet
        state       running
        command     python3 train.py
        tenant      speaks with the machine through the SDK
        devices     0
        share       50%
        steps       250/1000
        step        42.1 ms
        time left   31.6 s
        batch       64
        memory      512 MiB
        owner       root
        class       guaranteed
        starts      1, 0 failed
        age         42.0 s
        log         /state/jobs/0/log
        its last events ────────────────────────────────────────────────────────────────
            1.0 s  resnet  submitted
            1.0 s  resnet  to start on device 0
            1.1 s  resnet  runs

        s suspend  r resume  c cancel  esc back
    "#]]
    .assert_eq(&frame_as_text(&screen, 80, 24).unwrap());
}

#[test]
fn a_lost_daemon_is_reported_and_its_jobs_stay_visible() {
    let mut screen = Screen::default();
    screen.take(Err("no daemon answers".into()));
    let text = frame_as_text(&screen, 80, 24).unwrap();
    assert!(text.starts_with("no answer, trying again: no daemon answers"), "{text}");
    screen.take(Ok(snapshot()));
    screen.take(Err("no daemon answers".into()));
    let text = frame_as_text(&screen, 80, 24).unwrap();
    assert!(text.starts_with("no answer") && text.contains("resnet"), "{text}");
    screen.take(Ok(snapshot()));
    assert!(frame_as_text(&screen, 80, 24).unwrap().starts_with("roommate  3 devices"));
}

#[test]
fn terminals_of_any_size_can_be_drawn_on() {
    for width in [1, 20, 59, 60, 80, 300] {
        for height in [1, 5, 11, 12, 13, 24, 100] {
            for mode in [Mode::All, Mode::Detail, Mode::Confirm] {
                let screen = Screen { mode, ..screen() };
                frame_as_text(&screen, width, height).unwrap();
            }
        }
    }
}

#[test]
fn keys_select_jobs_and_act_on_them() {
    let mut screen = screen();
    let at = |s: &Screen| s.at.clone().unwrap();
    assert_eq!(at(&screen), "resnet");
    screen.press(Key::Up);
    assert_eq!(at(&screen), "resnet");
    screen.press(Key::Down);
    assert_eq!(at(&screen), "opaque");
    screen.press(Key::PageDown);
    assert_eq!(at(&screen), "slept");
    let job = || "slept".to_string();
    assert_eq!(screen.press(Key::Letter('s')), Do::Ask(Request::Suspend { job: job() }));
    assert_eq!(screen.press(Key::Letter('r')), Do::Ask(Request::Resume { job: job() }));
    // Cancelling needs a second key.
    assert_eq!(screen.press(Key::Letter('c')), Do::Nothing);
    assert!(frame_as_text(&screen, 80, 24).unwrap().contains("cancel slept?"));
    assert_eq!(screen.press(Key::Letter('n')), Do::Nothing);
    screen.press(Key::Letter('c'));
    assert_eq!(screen.press(Key::Letter('y')), Do::Ask(Request::Cancel { job: job() }));
    screen.press(Key::Enter);
    assert_eq!((screen.press(Key::Letter('q')), &screen.mode), (Do::Nothing, &Mode::All));
    assert_eq!(screen.press(Key::Letter('q')), Do::Quit);
}

#[test]
fn the_selection_follows_the_job_until_it_ends() {
    let mut screen = screen();
    screen.press(Key::Down);
    screen.press(Key::Letter('o'));
    assert_eq!(screen.at.as_deref(), Some("opaque"));
    let names: Vec<&str> = screen.tenants().iter().map(|j| j.name.as_str()).collect();
    assert_eq!(names, ["bert", "opaque", "resnet"]);
    screen.press(Key::Letter('c'));
    let mut later = snapshot();
    later.jobs.retain(|j| j.name != "opaque");
    screen.take(Ok(later));
    assert_eq!((screen.mode.clone(), screen.at.as_deref()), (Mode::All, Some("bert")));
}
