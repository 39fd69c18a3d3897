//! What the commands for users of a cluster show, as text: at most as wide as the terminal, with
//! the last column wrapped.

use crate::{console, table};
use roommate_core::time::Span;
use roommate_kube::story::Story;
use roommate_kube::view::{Tenant, View, Waiting, seconds_since};
use std::collections::BTreeMap;

/// The GPUs with their tenants, and those that are idle.
pub(super) fn top(view: &View, wide: bool) -> String {
    let mut head = row(&["NODE", "GPU", "POD", "CLASS", "SHARE", "MEMORY", "STEP", "STATE"]);
    if wide {
        head.extend(row(&["MODEL", "ROOMMATES"]));
    }
    let mut rows = vec![head];
    let mut on: BTreeMap<&str, Vec<&Tenant>> = BTreeMap::new();
    for tenant in &view.tenants {
        on.entry(&tenant.node).or_default().push(tenant);
    }
    let mut models: BTreeMap<&str, &str> = BTreeMap::new();
    for node in &view.nodes {
        models.insert(&node.node, &node.model);
        on.entry(&node.node).or_default();
    }
    for (name, tenants) in &on {
        for tenant in tenants {
            let mut cells = tenant_row(tenant);
            if wide {
                cells.push(models.get(name).unwrap_or(&"-").to_string());
                cells.push(tenant.roommates.join(", "));
            }
            rows.push(cells);
        }
        let node = view.nodes.iter().find(|n| n.node == **name);
        let Some(node) = node else { continue };
        let idle: Vec<u16> =
            (0..node.gpus).filter(|gpu| !tenants.iter().any(|t| t.gpu == *gpu)).collect();
        if !idle.is_empty() {
            let state = if node.up { "idle" } else { "down" };
            let mut cells = row(&[name, &ranges(&idle), "-", "-", "-", "-", "-", state]);
            if wide {
                cells.extend([node.model.clone(), String::new()]);
            }
            rows.push(cells);
        }
    }
    if !wide {
        narrow(&mut rows, console::width());
    }
    table::align_left(&rows)
}

/// Leaves out what is least missed, until the table fits.
fn narrow(rows: &mut [Vec<String>], width: Option<usize>) {
    for column in ["CLASS", "MEMORY", "STEP"] {
        let widest = table::align_left(rows).lines().map(|l| l.chars().count()).max();
        if width.is_none_or(|width| widest.is_some_and(|widest| widest <= width)) {
            return;
        }
        if let Some(at) = rows[0].iter().position(|head| head == column) {
            rows.iter_mut().for_each(|row| drop(row.remove(at)));
        }
    }
}

fn row(cells: &[&str]) -> Vec<String> {
    cells.iter().map(ToString::to_string).collect()
}

fn tenant_row(tenant: &Tenant) -> Vec<String> {
    // From what it is promised to the most that it may use.
    let (least, most) = (tenant.share_percent.unwrap_or(0.0), tenant.limit_percent);
    let share = if least == most { format!("{most}%") } else { format!("{least}-{most}%") };
    vec![
        tenant.node.clone(),
        tenant.gpu.to_string(),
        format!("{}/{}", tenant.namespace, tenant.pod),
        tenant.class.clone(),
        share,
        tenant.mem_mib.map_or("-".into(), memory),
        tenant.step_s.map_or("-".into(), |s| format!("{s:.3}s")),
        tenant.state.into(),
    ]
}

/// MiB, or GiB where that is as exact.
fn memory(mib: u32) -> String {
    if mib.is_multiple_of(1024) { format!("{}Gi", mib / 1024) } else { format!("{mib}Mi") }
}

/// `0-3,7`.
fn ranges(numbers: &[u16]) -> String {
    let mut parts: Vec<(u16, u16)> = Vec::new();
    for number in numbers {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == *number => *last = *number,
            _ => parts.push((*number, *number)),
        }
    }
    let text = |(first, last): &(u16, u16)| match last - first {
        0 => first.to_string(),
        _ => format!("{first}-{last}"),
    };
    parts.iter().map(text).collect::<Vec<_>>().join(",")
}

/// The cluster in a line.
pub(super) fn summary(view: &View) -> String {
    let gpus: u64 = view.nodes.iter().map(|n| u64::from(n.gpus)).sum();
    let mut used: Vec<(&str, u16)> =
        view.tenants.iter().map(|t| (t.node.as_str(), t.gpu)).collect();
    used.sort_unstable();
    used.dedup();
    let mut pods: Vec<(&str, &str)> =
        view.tenants.iter().map(|t| (t.namespace.as_str(), t.pod.as_str())).collect();
    pods.sort_unstable();
    pods.dedup();
    let waiting = view.waiting.len() as u64;
    let of = match gpus {
        0 => String::new(),
        _ => format!(" of {gpus}"),
    };
    format!(
        "{} on {}{of} GPUs, {} {}",
        table::count(pods.len() as u64, "pod"),
        used.len(),
        table::count(waiting, "pod"),
        if waiting == 1 { "waits" } else { "wait" },
    )
}

/// The pods that wait.
pub(super) fn queue(waiting: &[Waiting], wide: bool) -> String {
    let mut rows = vec![row(&["POD", "QUEUE", "GPUS", "AGE", "WHY"])];
    for pod in waiting {
        let name = format!("{}/{}", pod.namespace, pod.pod);
        let cells = [name, pod.queue.clone(), pod.gpus.to_string(), age(&pod.since)];
        rows.push(cells.into_iter().chain([pod.why.clone()]).collect());
    }
    if wide { table::align_left(&rows) } else { wrapped(&rows, table::GAP) }
}

/// How long ago that was.
fn age(since: &str) -> String {
    seconds_since(since).map_or("-".into(), |s| match s as u64 {
        s @ 0..=59 => format!("{s}s"),
        _ => Span::from_secs(s).to_string(),
    })
}

/// What is known of a pod.
pub(super) fn story(story: &Story) -> String {
    let mut rows: Vec<Vec<String>> = Vec::new();
    let mut tell = |what: &str, text: String| rows.push(vec![what.into(), text]);
    let pod = format!("{}/{}, {}", story.namespace, story.pod, story.phase);
    tell("pod", pod);
    if let Some(waits) = &story.waits {
        let gpus = table::count(waits.gpus, "GPU");
        let age = age(&waits.since);
        tell("waits", format!("{age}, for {gpus}, in queue {}", waits.queue));
        tell("why", story.wrong.clone().unwrap_or_else(|| waits.why.clone()));
    } else if let Some(wrong) = &story.wrong {
        tell("why", wrong.clone());
    } else if story.on.is_empty() {
        let scheduler = &story.scheduler;
        tell("why", format!("it has no GPUs of Roommate; its scheduler is {scheduler:?}"));
    }
    for tenant in &story.on {
        let share = match tenant.share_percent {
            Some(percent) => format!("{percent} % of it"),
            None => "no promised part of it".into(),
        };
        let most = match tenant.limit_percent {
            100.0 => String::new(),
            percent => format!(", at most {percent} %"),
        };
        let mem = tenant.mem_mib.map_or(String::new(), |mib| format!(", {}", memory(mib)));
        tell("on", format!("{}, GPU {}: {share}{most}{mem}", tenant.node, tenant.gpu));
        if !tenant.roommates.is_empty() {
            tell("beside", tenant.roommates.join(", "));
        }
    }
    if let Some(tenant) = story.on.first() {
        let step = tenant.step_s.map_or(String::new(), |s| format!(", a step takes {s:.3} s"));
        let force = if tenant.in_force { "" } else { "; its node has not confirmed it" };
        tell("state", format!("{}{step}{force}", tenant.state));
    }
    if let Some(written) = &story.translated_from {
        tell("asked as", written.clone());
    }
    let mut text = wrapped(&rows, table::GAP);
    if !story.events.is_empty() {
        let mut rows = vec![row(&["AGE", "BY", "EVENT", "WHAT"])];
        let events = story.events.iter();
        rows.extend(
            events.map(|e| vec![age(&e.at), e.by.clone(), e.reason.clone(), e.what.clone()]),
        );
        text = text + "\n" + &wrapped(&rows, table::GAP);
    }
    text
}

/// The least width of the last column before it is not wrapped any more.
const LEAST: usize = 20;

/// Aligns all columns to the left; on a terminal the last one is wrapped to its width.
pub(super) fn wrapped(rows: &[Vec<String>], gap: &str) -> String {
    wrapped_within(rows, gap, console::width())
}

fn wrapped_within(rows: &[Vec<String>], gap: &str, width: Option<usize>) -> String {
    let rows: Vec<Vec<String>> =
        rows.iter().map(|row| row.iter().map(console::printable).collect()).collect();
    let columns = rows.iter().map(Vec::len).max().unwrap_or(1);
    let widest = |c: usize| rows.iter().filter_map(|r| r.get(c)).map(|t| t.chars().count()).max();
    let widths: Vec<usize> = (0..columns - 1).map(|c| widest(c).unwrap_or(0)).collect();
    let before: usize = widths.iter().map(|w| w + gap.len()).sum();
    let room = width.map(|w| w.saturating_sub(before)).filter(|room| *room >= LEAST);
    let mut text = String::new();
    for row in &rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}{gap}"));
        let mut line: String = cells.collect();
        let last = row.get(columns - 1).map_or("", String::as_str);
        for (i, part) in lines(last, room.unwrap_or(usize::MAX)).iter().enumerate() {
            if i > 0 {
                line = " ".repeat(before);
            }
            text += format!("{line}{part}").trim_end();
            text += "\n";
        }
    }
    text
}

/// A text in lines of at most so many characters, broken between words where that is possible.
fn lines(text: &str, most: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.last_mut().expect("there is a line");
        let used = last.chars().count();
        if used > 0 && used.saturating_add(1 + word.chars().count()) > most {
            lines.push(word.into());
        } else {
            if used > 0 {
                last.push(' ');
            }
            last.push_str(word);
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod(name: &str, node: Option<&str>, gpu: u16, more: &Value) -> Value {
        let knobs = more.get("knobs").cloned().unwrap_or(json!({}));
        let assignment = json!({"gpus": [gpu], "knobs": knobs, "term": 1, "decision": 4});
        let mut annotations = json!({"roommate.dev/assignment": assignment.to_string(),
                                     "roommate.dev/applied": r#"{"term":1,"decision":4}"#});
        if let Some(step_s) = more.get("step_s") {
            annotations["roommate.dev/measured"] = json!(json!({"step_s": step_s}).to_string());
        }
        json!({
            "metadata": {"name": name, "namespace": "ml", "uid": name, "annotations": annotations},
            "spec": {"nodeName": node, "schedulerName": "roommate", "containers": [
                {"name": "x", "resources": {"limits": {"roommate.dev/gpu": "1"}}}]},
            "status": {"phase": "Running", "conditions": [{"type": "PodScheduled",
                "status": "False", "message": "waits: beside job ml/a it would run at 0.52 of \
                its speed alone and cost its roommates 0.61"}]},
        })
    }

    fn view() -> View {
        let node = |name: &str| {
            json!({"metadata": {"name": name, "labels": {"roommate.dev/slots": "4",
                        "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}},
                   "status": {"allocatable": {"roommate.dev/gpu": "16"},
                              "conditions": [{"type": "Ready", "status": "True"}]}})
        };
        let knobs = json!({"sm_permille": 300, "sm_most_permille": 500, "mem_mib": 8192});
        View::of(&[
            pod("bert-finetune-0", Some("gpu-0"), 1, &json!({"knobs": knobs, "step_s": 0.25})),
            pod("resnet-0", Some("gpu-0"), 1, &json!({"knobs": {"sm_permille": 0}})),
            pod("waits", None, 0, &json!({})),
        ])
        .with(&[node("gpu-0"), node("gpu-1")])
    }

    #[test]
    fn the_top_screen_fits_eighty_columns() {
        let text = top(&view(), false);
        expect_test::expect![[r#"
            NODE   GPU    POD                 CLASS       SHARE   MEMORY  STEP    STATE
            gpu-0  1      ml/bert-finetune-0  guaranteed  30-50%  8Gi     0.250s  running
            gpu-0  1      ml/resnet-0         guaranteed  0-100%  -       -       running
            gpu-0  0,2-3  -                   -           -       -       -       idle
            gpu-1  0-3    -                   -           -       -       -       idle
        "#]]
        .assert_eq(&text);
        assert!(text.lines().all(|line| line.chars().count() <= 80));
        let mut rows = vec![row(&["NODE", "CLASS", "STATE"]), row(&["gpu-0", "service", "idle"])];
        narrow(&mut rows, Some(14));
        assert_eq!(rows[1], ["gpu-0", "idle"]);
        assert_eq!(summary(&view()), "2 pods on 1 of 8 GPUs, 1 pod waits");
    }

    #[test]
    fn the_last_column_is_wrapped_to_the_terminal() {
        let waiting = &view().waiting;
        let mut rows = vec![row(&["POD", "QUEUE", "GPUS", "WHY"])];
        rows.push(vec!["ml/waits".into(), "default".into(), "1".into(), waiting[0].why.clone()]);
        expect_test::expect![[r#"
            POD       QUEUE    GPUS  WHY
            ml/waits  default  1     waits: beside job ml/a it would run
                                     at 0.52 of its speed alone and cost
                                     its roommates 0.61
        "#]]
        .assert_eq(&wrapped_within(&rows, table::GAP, Some(60)));
        let whole = wrapped_within(&rows, table::GAP, None);
        assert_eq!(whole.lines().count(), 2);
    }

    #[test]
    fn idle_gpus_are_ranges() {
        assert_eq!(ranges(&[0, 1, 2, 5, 7, 8]), "0-2,5,7-8");
    }
}
