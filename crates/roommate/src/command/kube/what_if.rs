//! `what-if`: what would become of a job.

use super::screens;
use super::user::{print_json, reach, snapshot_of};
use crate::cli::kube::{Shown, WhatIf};
use crate::{ANSWER_NO, console, table};
use anyhow::Context;
use roommate_core::reason::Source;
use roommate_core::time::Span;
use roommate_kube::client::get;
use roommate_kube::manifest::{self, Pods};
use roommate_kube::names;
use roommate_kube::snapshot::Snapshot;
use roommate_kube::what_if::{self, Outcome, Slowdown, Verdict};
use serde_json::{Value, json};
use std::io::Read;
use std::process::ExitCode;

pub(super) async fn run(args: &WhatIf) -> anyhow::Result<ExitCode> {
    let wanted = pods_of(args)?;
    let journal = snapshot_of(&args.from, &args.at.cluster.access()).await?;
    let snapshot = Snapshot::of(&journal).context("could not read the snapshot")?;
    // A saved snapshot is asked without a cluster, unless one is named.
    let offline = args.from.snapshot.is_some();
    let (wanted, namespace, nodes) = if offline {
        let namespace = args.at.namespace.clone();
        let own = wanted.pod.pointer("/metadata/namespace").and_then(Value::as_str);
        let namespace = namespace.or(own.map(String::from)).unwrap_or_else(|| "default".into());
        (translated(wanted)?, namespace, None)
    } else {
        let (client, usual) = reach(&args.at).await?;
        let own = wanted.pod.pointer("/metadata/namespace").and_then(Value::as_str);
        let namespace = args.at.namespace.clone().or(own.map(String::from)).unwrap_or(usual);
        let admitted = wanted.admitted(&client, &namespace).await;
        let admitted = admitted
            .map_err(|failure| anyhow::anyhow!("the API server refuses such a pod: {failure}"))?;
        let nodes = get(&client, "/api/v1/nodes").await;
        let nodes = nodes.map_err(|failure| anyhow::anyhow!("list of nodes: {failure}"))?;
        let nodes = nodes.get("items").and_then(Value::as_array).cloned();
        (admitted, namespace, nodes)
    };
    if wanted.scheduler() != Some(names::SCHEDULER) {
        let what = format!("its pods name the scheduler {:?}", wanted.scheduler().unwrap_or(""));
        let hint = format!("set spec.schedulerName: {}, or install the webhook", names::SCHEDULER);
        return Err(console::advise(what, hint));
    }
    let open = what_if::without_end(&snapshot);
    let (pod, request) = match wanted.request(&namespace) {
        Ok(found) => found,
        Err(why) => {
            let job = format!("{namespace}/{}", wanted.name);
            return answer(args, &[never(job, why)], &open, offline);
        }
    };
    let allowed = nodes.as_ref().map(|nodes| manifest::allows(&request, nodes));
    let allows = |name: &str| allowed.as_ref().is_none_or(|allowed| allowed(name));
    let question = wanted.question(&pod, &request, &allows);
    let verdicts = what_if::ask(snapshot, &question).map_err(anyhow::Error::msg)?;
    answer(args, &verdicts, &open, offline)
}

/// A job that can never run.
fn never(job: String, why: String) -> Verdict {
    Verdict {
        job,
        gpus: 0,
        outcome: Outcome::Never,
        starts_in_s: None,
        why: Some(why),
        others_waiting: 0,
        places: Vec::new(),
        runs: None,
        roommates: Vec::new(),
        others: Vec::new(),
    }
}

/// The pods of the manifest.
fn pods_of(args: &WhatIf) -> anyhow::Result<Pods> {
    let named = format!("could not read manifest {:?}", args.manifest.display().to_string());
    let mut text = String::new();
    if args.manifest.as_os_str() == "-" {
        std::io::stdin().read_to_string(&mut text).context(named.clone())?;
    } else {
        text = std::fs::read_to_string(&args.manifest).context(named.clone())?;
    }
    manifest::read(&text).map_err(|(why, hint)| console::advise(format!("{named}: {why}"), hint))
}

/// The same pods as the webhook would admit them.
fn translated(mut pods: Pods) -> anyhow::Result<Pods> {
    let admitted = roommate_kube::webhook::admit(&pods.pod, names::SCHEDULER);
    let admitted = admitted.map_err(anyhow::Error::msg)?;
    admitted.apply(&mut pods.pod);
    admitted.warnings.iter().for_each(|warning| console::say(&format!("warning: {warning}")));
    Ok(pods)
}

fn answer(
    args: &WhatIf,
    verdicts: &[Verdict],
    open: &[String],
    offline: bool,
) -> anyhow::Result<ExitCode> {
    if args.output == Shown::Json {
        print_json(&json!({"jobs": verdicts, "without_length": open}))?;
    } else {
        let screens: Vec<String> = grouped(verdicts).iter().map(|(v, n)| screen(v, *n)).collect();
        console::print(&screens.join("\n"))?;
        let unknown =
            verdicts.iter().any(|v| v.outcome == Outcome::Waits && v.starts_in_s.is_none());
        if unknown && !open.is_empty() {
            console::say_lines(&note(open));
        }
        if offline {
            console::say(
                "note: selectors and taints of nodes are not in a snapshot and do not count",
            );
        }
    }
    let no = verdicts.iter().any(|v| v.outcome == Outcome::Never);
    Ok(if no { ExitCode::from(ANSWER_NO) } else { ExitCode::SUCCESS })
}

/// Why it is not known when it starts.
fn note(open: &[String]) -> String {
    let (shown, more) = open.split_at(open.len().min(3));
    let more = if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
    let name = names::SECONDS;
    format!(
        "note: nobody knows when {}{more} end: they have no annotation {name}",
        shown.join(", ")
    )
}

/// Jobs of which nothing else can be said than of the one before are counted.
fn grouped(verdicts: &[Verdict]) -> Vec<(&Verdict, usize)> {
    let mut found: Vec<(&Verdict, usize)> = Vec::new();
    for verdict in verdicts {
        let alike = |v: &Verdict| {
            let same = (&v.why, v.starts_in_s, v.outcome)
                == (&verdict.why, verdict.starts_in_s, verdict.outcome);
            same && v.outcome != Outcome::Starts
        };
        match found.last_mut().filter(|(last, _)| alike(last)) {
            Some((_, count)) => *count += 1,
            None => found.push((verdict, 1)),
        }
    }
    found
}

/// A verdict in words.
fn screen(verdict: &Verdict, count: usize) -> String {
    let mut rows: Vec<Vec<String>> = Vec::new();
    let mut tell = |what: &str, text: String| rows.push(vec![what.into(), text]);
    let more = if count > 1 { format!(" and {} like it", count - 1) } else { String::new() };
    let gpus = match verdict.gpus {
        0 => String::new(),
        gpus => format!(", {}", table::count(gpus.into(), "GPU")),
    };
    tell("job", format!("{}{more}{gpus}", verdict.job));
    let after = |s: f64| Span::from_secs(s).to_string();
    match (verdict.outcome, verdict.starts_in_s) {
        (Outcome::Starts, _) => tell("starts", "at once".into()),
        (Outcome::Waits, Some(s)) => tell("starts", format!("after about {}", after(s))),
        (Outcome::Waits, None) => tell("starts", "later; when is not known".into()),
        (Outcome::Never, _) => tell("starts", "never".into()),
    }
    if let Some(why) = &verdict.why {
        tell("why", why.clone());
    }
    if verdict.outcome == Outcome::Waits && verdict.others_waiting > 0 {
        let others = table::count(verdict.others_waiting as u64, "other job");
        tell("queue", format!("with {others}"));
    }
    for place in &verdict.places {
        let numbers: Vec<String> = place.gpus.iter().map(ToString::to_string).collect();
        let gpus = if numbers.len() == 1 { "GPU" } else { "GPUs" };
        tell("on", format!("{}, {gpus} {}", place.node, numbers.join(" ")));
    }
    if let Some(runs) = &verdict.runs {
        let share = match runs.share_percent {
            Some(percent) => format!("{percent} % of each GPU"),
            None => "no promised part".into(),
        };
        let most = match runs.limit_percent {
            100.0 => String::new(),
            percent => format!(", at most {percent} %"),
        };
        tell("share", share + &most);
        tell("steps", relative(&runs.slowdown, None));
    }
    for roommate in &verdict.roommates {
        let steps = relative(&roommate.after, roommate.before.as_ref());
        tell("beside", format!("{}: its steps {steps}", roommate.job));
    }
    for other in &verdict.others {
        tell("then", other.clone());
    }
    screens::wrapped(&rows, table::GAP)
}

fn relative(slowdown: &Slowdown, before: Option<&Slowdown>) -> String {
    let Slowdown { times, source } = *slowdown;
    if times == 1.0 && source == Source::Measured {
        return "take as long as alone".into();
    }
    let how = match source {
        Source::Measured => "as measured",
        Source::Learnt => "predicted from what both use",
        Source::Thumb => "by rule of thumb",
    };
    let before = before.map_or(String::new(), |b| format!(" (before: {:.2})", b.times));
    format!("take {times:.2} times as long as alone{before}, {how}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use roommate_kube::what_if::{Place, Roommate, Runs};

    fn verdict(outcome: Outcome) -> Verdict {
        let slowdown = |times, source| Slowdown { times, source };
        Verdict {
            gpus: 1,
            starts_in_s: Some(754.0),
            others_waiting: 2,
            outcome,
            places: vec![Place { node: "gpu-0".into(), gpus: vec![1] }],
            runs: Some(Runs {
                share_percent: Some(30.0),
                limit_percent: 100.0,
                slowdown: slowdown(1.25, Source::Learnt),
            }),
            roommates: vec![Roommate {
                job: "ml/resnet-0".into(),
                before: Some(slowdown(1.0, Source::Measured)),
                after: slowdown(1.4, Source::Thumb),
            }],
            others: vec!["ml/idle is suspended (suspended for job ml/t)".into()],
            ..never("ml/t".into(), "does not fit: needs 1 GPUs, 0 idle in the cluster".into())
        }
    }

    #[test]
    fn a_verdict_reads_like_an_answer() {
        expect_test::expect![[r#"
            job     ml/t and 2 like it, 1 GPU
            starts  after about 12m 34s
            why     does not fit: needs 1 GPUs, 0 idle in the cluster
            queue   with 2 other jobs
            on      gpu-0, GPU 1
            share   30 % of each GPU
            steps   take 1.25 times as long as alone, predicted from what both use
            beside  ml/resnet-0: its steps take 1.40 times as long as alone (before: 1.00), by rule of thumb
            then    ml/idle is suspended (suspended for job ml/t)
        "#]].assert_eq(&screen(&verdict(Outcome::Waits), 3));
        let refused = never("ml/t".into(), "it asks for no roommate.dev/gpu".into());
        expect_test::expect![[r#"
            job     ml/t
            starts  never
            why     it asks for no roommate.dev/gpu
        "#]]
        .assert_eq(&screen(&refused, 1));
    }

    #[test]
    fn jobs_that_wait_alike_are_counted() {
        let waits = Verdict { starts_in_s: None, ..verdict(Outcome::Waits) };
        let all = [verdict(Outcome::Starts), verdict(Outcome::Starts), waits.clone(), waits];
        let counts: Vec<usize> = grouped(&all).iter().map(|(_, n)| *n).collect();
        assert_eq!(counts, [1, 1, 2]);
    }
}
