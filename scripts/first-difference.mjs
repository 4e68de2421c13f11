/** The first line in which two texts differ, or undefined; a side that has ended is undefined. */
export function firstDifference(left, right) {
  if (left === right) return undefined
  const leftLines = left.split('\n')
  const rightLines = right.split('\n')
  const index = Array.from({ length: Math.max(leftLines.length, rightLines.length) }).findIndex(
    (_, at) => leftLines[at] !== rightLines[at],
  )
  return { line: index + 1, left: leftLines[index], right: rightLines[index] }
}
