//! How much memory the process may have: the machine's, or less where a control group limits it (containers).

use std::sync::OnceLock;

/// Bytes, or `None` where the system doesn't say. Looked up once.
pub(crate) fn machine_memory() -> Option<u64> {
    static MEMORY: OnceLock<Option<u64>> = OnceLock::new();
    *MEMORY.get_or_init(|| least_of(|path| std::fs::read_to_string(path).ok()))
}

/// The least of what the system's files say: physical memory, and the limits of the process's control group and those
/// around it, of version 1 or 2. `read` yields the text of a file.
fn least_of(read: impl Fn(&str) -> Option<String>) -> Option<u64> {
    let physical = read("/proc/meminfo").as_deref().and_then(total);
    let groups = read("/proc/self/cgroup").unwrap_or_default();
    let limits = groups
        .lines()
        .filter_map(directory)
        .flat_map(|(mount, path, file)| around(path).map(move |path| format!("{mount}{path}/{file}")));
    // Version 1 says "none" with a number near 2^63, version 2 with a word.
    let limits = limits.filter_map(|file| read(&file)?.trim().parse::<u64>().ok());
    limits.chain(physical).min()
}

/// `MemTotal` of `/proc/meminfo`, which counts in KiB.
fn total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim()
        .strip_suffix("kB")?
        .trim()
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)
}

/// Where the control group of a line of `/proc/self/cgroup` is mounted, its path there, and its file with the limit.
/// Lines are `number:controllers:path`, without controllers in version 2.
fn directory(line: &str) -> Option<(&'static str, &str, &'static str)> {
    let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
    if controllers.is_empty() {
        Some(("/sys/fs/cgroup", path, "memory.max"))
    } else if controllers.split(',').any(|name| name == "memory") {
        Some(("/sys/fs/cgroup/memory", path, "memory.limit_in_bytes"))
    } else {
        None
    }
}

/// A path and all above it; that of the root, which is empty, too. (In a container its own group is mounted as the
/// root.)
fn around(path: &str) -> impl Iterator<Item = &str> {
    let path = path.trim_end_matches('/');
    std::iter::successors(Some(path), |path| path.rfind('/').map(|end| &path[..end]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Option<u64> {
        least_of(|path| {
            files
                .iter()
                .find(|(name, _)| *name == path)
                .map(|(_, text)| (*text).into())
        })
    }

    #[test]
    fn the_least_of_all_limits_counts() {
        const MEMINFO: (&str, &str) = ("/proc/meminfo", "MemTotal:       16384 kB\nMemFree:  1 kB\n");
        assert_eq!(found(&[]), None);
        assert_eq!(found(&[MEMINFO]), Some(16 << 20));
        let v2 = ("/proc/self/cgroup", "0::/a/b\n");
        for (at, limit) in [("/a/b", 5), ("/a", 6), ("", 7)] {
            let (file, text) = (format!("/sys/fs/cgroup{at}/memory.max"), format!("{limit}\n"));
            assert_eq!(found(&[MEMINFO, v2, (&file, &text)]), Some(limit), "{at}");
            assert_eq!(found(&[MEMINFO, v2, (&file, "max\n")]), Some(16 << 20));
        }
        let v1 = ("/proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/1\n0::/\n");
        for (limit, least) in [("9000", 9000), ("9223372036854771712", 16 << 20)] {
            let file = ("/sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes", limit);
            assert_eq!(found(&[MEMINFO, v1, file]), Some(least));
        }
        assert_eq!(
            found(&[v1, ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "77")]),
            Some(77)
        );
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_machine_has_some() {
        assert!(machine_memory().is_some_and(|bytes| bytes > 64 << 20));
    }
}
