export * from './names.js'
export * from './operations.js'
export * from './problem.js'
